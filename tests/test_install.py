"""install(), uninstall() and installed(): whose functions `flax.training.checkpoints` holds, and when."""

import functools
import importlib
import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from tests.support import interpreters

NAMES = [name for name in ours.__all__ if inspect.isroutine(getattr(ours, name))] + ["AsyncManager"]


@pytest.fixture
def real() -> Iterator[types.ModuleType]:
    """Flax's own module, as Flax made it, before and after."""
    module = importlib.import_module("flax.training.checkpoints")
    before = dict(vars(module))
    yield module
    flax_ckpt_compat.uninstall()
    assert dict(vars(module)) == before


@pytest.fixture
def user() -> Iterator[types.ModuleType]:
    """A module of the user's, in sys.modules, with an empty namespace."""
    module = types.ModuleType("some_user_module")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def run_python(code: str, *, fresh: bool = True, **environment: str) -> str:
    """The stdout of a program, by default in an interpreter that has imported nothing."""
    return str(interpreters.run_python(code, fresh=fresh, **environment)[0])


def test_every_public_function_becomes_ours_and_helpers_stay(
    real: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nine public names are replaced; constants, underscored helpers and other names of functions stay Flax's."""
    monkeypatch.setattr(real, "_save_of_flax", real.save_checkpoint, raising=False)
    before = dict(vars(real))
    flax_ckpt_compat.install()
    changed = {name for name, value in vars(real).items() if before.get(name) is not value}
    assert changed == set(NAMES)
    assert all(vars(real)[name] is getattr(ours, name) for name in NAMES)


def test_names_taken_out_earlier_are_replaced(real: types.ModuleType, user: types.ModuleType) -> None:
    """A module that imported functions before install(), under any name, gets ours, and its own back.

    Partials and default arguments keep Flax's, as documented, and uninstall() leaves alone what was bound anew."""
    vars(user).update(sc=real.save_checkpoint, AsyncManager=real.AsyncManager, other=real.os, c=real, n=None)
    vars(user).update(later=functools.partial(real.save_checkpoint, keep=3), mine=real.save_checkpoint)
    user.gone = real.restore_checkpoint
    before = dict(vars(user))
    flax_ckpt_compat.install()
    assert user.sc is user.mine is ours.save_checkpoint
    assert user.AsyncManager is ours.AsyncManager
    assert (user.other, user.c, user.later.func) == (real.os, real, before["sc"])
    assert pickle.loads(pickle.dumps(real.save_checkpoint)) is ours.save_checkpoint
    user.mine = print
    del user.gone
    flax_ckpt_compat.uninstall()
    del before["gone"]
    assert dict(vars(user)) == before | {"mine": print}


def test_a_reloaded_module_is_patched_again(real: types.ModuleType) -> None:
    """After importlib.reload() the functions are still ours."""
    before = dict(vars(real))
    try:
        with flax_ckpt_compat.installed():
            importlib.reload(real)
            assert real.save_checkpoint is ours.save_checkpoint
        assert real.save_checkpoint.__module__ == "flax.training.checkpoints"
    finally:
        vars(real).update(before)


def test_installing_looks_at_no_attribute(real: types.ModuleType) -> None:
    """Lazy modules and proxies in sys.modules are not woken up by the search."""

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"somebody asked for {name}")

    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"somebody asked for {name}")

        __class__ = property(lambda self: self.missing)  # type: ignore[assignment]

    strangers: dict[str, Any] = {"lazy_stranger": Lazy("lazy_stranger"), "proxy": Proxy(), "none": None}
    sys.modules.update(strangers)
    try:
        flax_ckpt_compat.install()
        flax_ckpt_compat.uninstall()
    finally:
        for name in strangers:
            del sys.modules[name]


def test_ways_in_and_out(real: types.ModuleType) -> None:
    """Twice is once, whether in or out; only the last way out of contexts undoes, be it an exception or IPython's.

    `flax_ckpt_compat.checkpoints` has the same namespace before, during and after."""
    original, own = real.save_checkpoint, dict(vars(ours))
    for change in (flax_ckpt_compat.install, flax_ckpt_compat.uninstall):
        for _ in range(2):
            change()
            assert (real.save_checkpoint is original) == (change is flax_ckpt_compat.uninstall)
    with flax_ckpt_compat.installed():
        with flax_ckpt_compat.installed():
            assert dict(vars(ours)) == own
        assert real.save_checkpoint is ours.save_checkpoint
        flax_ckpt_compat.uninstall()
        assert real.save_checkpoint is ours.save_checkpoint
    assert real.save_checkpoint is original
    flax_ckpt_compat.load_ipython_extension(None)
    with flax_ckpt_compat.installed():
        pass
    assert real.save_checkpoint is ours.save_checkpoint
    flax_ckpt_compat.unload_ipython_extension(None)
    with pytest.raises(KeyError), flax_ckpt_compat.installed():
        raise KeyError
    assert real.save_checkpoint is original and dict(vars(ours)) == own


@pytest.mark.slow
def test_first_imports_from_eight_threads() -> None:
    """Threads that install and threads that import Flax's module for the first time neither hang nor see originals."""
    out = run_python("""
        import faulthandler, threading
        faulthandler.dump_traceback_later(50, exit=True)
        import flax_ckpt_compat, flax_ckpt_compat._patching as hook
        hook.install_on_import()
        seen = []
        def work(number):
            if number % 2:
                flax_ckpt_compat.install()
            from flax.training.checkpoints import save_checkpoint
            seen.append(save_checkpoint.__module__)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(len(seen), set(seen))
        """)
    assert out == "8 {'flax_ckpt_compat.checkpoints'}\n"


def test_before_flax_is_imported() -> None:
    """A program that imports Flax's module after install() gets ours, and introspection still finds Flax's source."""
    code = """
        import sys, flax
        for module in [m for m in sys.modules if m.startswith(("flax.training", "flax_ckpt_compat"))]:
            del sys.modules[module]
        del flax.training
        import flax_ckpt_compat
        flax_ckpt_compat.install()
        from flax.training import checkpoints
        from flax.training.checkpoints import restore_checkpoint as rc
        import flax.training.checkpoints as c, inspect, pickle
        print(c is checkpoints, rc.__module__, checkpoints.save_checkpoint.__module__)
        print("def save_checkpoint" in inspect.getsource(c), type(c.__loader__).__name__)
        print(c.__spec__.loader is c.__loader__)
        print(pickle.loads(pickle.dumps(rc)) is rc)
        """
    assert run_python(code, fresh=False).splitlines() == [
        "True flax_ckpt_compat.checkpoints flax_ckpt_compat.checkpoints",
        "True SourceFileLoader",
        "True",
        "True",
    ]


def test_other_finders_and_tools(tmp_path: Path) -> None:
    """Finders of an old kind are skipped, as Python does; runpy and others find the source before the import."""
    out = run_python(
        """
        import importlib.util, runpy, sys
        import flax_ckpt_compat._patching as hook
        class Old:
            def find_module(self, name, path=None): ...
        sys.meta_path.insert(0, Old())
        for module in [m for m in sys.modules if m.startswith("flax.training")]:
            del sys.modules[module]
        hook.install_on_import()
        spec = importlib.util.find_spec("flax.training.checkpoints")
        print("def save_checkpoint" in spec.loader.get_source(spec.name), hasattr(spec.loader, "get_nothing"))
        print(runpy.run_module("flax.training.checkpoints")["save_checkpoint"].__module__)
        from flax.training.checkpoints import save_checkpoint
        print(save_checkpoint.__module__)
        """,
        fresh=False,
        PYTHONWARNINGS="ignore",
    )
    assert out.split() == ["True", "False", "flax.training.checkpoints", "flax_ckpt_compat.checkpoints"]


FAKES = {
    "ModuleNotFoundError": {"flax/training/__init__.py": ""},
    "ModuleNotFoundError, package too": {},
    "ImportError": {"flax/training/__init__.py": "", "flax/training/checkpoints.py": "from os import nonsense"},
    "AttributeError": {"flax/training/__init__.py": "", "flax/training/checkpoints.py": "x = 1\nx.gone"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "ImportError" else ()) for name in FAKES]
)
def test_without_flax_own_module(tmp_path: Path, name: str) -> None:
    """Where Flax's module is gone or fails to import, one of that name with our names stands in, until uninstall()."""
    for file, text in FAKES[name].items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    out = run_python(
        """
        import os, sys, types
        import flax, flax_ckpt_compat
        from flax_ckpt_compat import checkpoints as ours
        if os.path.isdir(os.environ["FAKE"] + "/flax/training"):
            flax.__path__[:] = [os.environ["FAKE"] + "/flax"]
        else:
            flax.__path__[:] = []
        for module in [m for m in sys.modules if m.startswith("flax.training")]:
            del sys.modules[module]
        vars(flax).pop("training", None)
        flax_ckpt_compat.install()
        from flax.training import checkpoints as c
        import flax.training.checkpoints
        assert flax.training.checkpoints is c is sys.modules["flax.training.checkpoints"]
        assert all(getattr(c, n) is getattr(ours, n) for n in ours.__all__), vars(c).keys()
        assert not [n for n in vars(c) if not n.startswith("_") and n not in ours.__all__]
        assert c._checkpoint_path("a", "tmp", "x_") == "a/x_tmp" and c._checkpoint_path_step("a/x_12") == 12
        with flax_ckpt_compat.installed():
            pass
        flax_ckpt_compat.install()
        assert flax.training.checkpoints is c
        flax_ckpt_compat.uninstall()
        assert "flax.training.checkpoints" not in sys.modules
        assert "checkpoints" not in vars(sys.modules.get("flax.training", sys))
        try:
            import flax.training.checkpoints
        except Exception as error:
            print(type(error).__name__)
        """,
        fresh=False,
        FAKE=str(tmp_path),
    )
    assert out.strip() == name.partition(",")[0]


def test_without_flax_at_all() -> None:
    """Without Flax install() raises the plain ImportError."""
    out = run_python("""
        import sys, flax_ckpt_compat
        sys.modules["flax"] = None
        try:
            flax_ckpt_compat.install()
        except ImportError as error:
            print(error.name)
        """)
    assert out.startswith("flax")
