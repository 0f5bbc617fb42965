"""The package itself: what it offers, its signatures, its wheel, and what importing it costs."""

import configparser
from pathlib import Path

import pytest

import flax_ckpt_compat
from tests import public_signatures
from tests.support.interpreters import run_python

ROOT = Path(__file__).parents[1]
HEAVY = {"jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tensorstore", "msgpack", "orbax", "rich", "click", "etils"}


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement."""
    return set(run_python(f"{statement}\nimport sys\nprint(*sys.modules)", fresh=True)[0].split())


def test_all_is_sorted_and_complete() -> None:
    """__all__ is sorted, everything in it exists, and nothing else is public."""
    assert flax_ckpt_compat.__all__ == sorted(flax_ckpt_compat.__all__)
    assert all(hasattr(flax_ckpt_compat, name) for name in flax_ckpt_compat.__all__)
    namespace: dict[str, object] = {}
    exec("from flax_ckpt_compat import *", namespace)
    assert set(flax_ckpt_compat.__all__) <= namespace.keys()
    assert dir(flax_ckpt_compat) == flax_ckpt_compat.__all__


@pytest.mark.parametrize("name", ["checkpoints", "config", "errors", "rules", "transforms"])
def test_completion_shows_the_api_only(name: str) -> None:
    """No import of a module, and no helper, is among the names of ``dir``; of ``config``, the settings are."""
    module = getattr(flax_ckpt_compat, name)
    settings = dir(flax_ckpt_compat.config.Settings()) if name == "config" else []
    assert set(module.__all__) <= set(dir(module)) <= {*module.__all__, *settings}


def test_unknown_names_are_attribute_errors() -> None:
    """A misspelt name is the usual AttributeError."""
    with pytest.raises(AttributeError, match="has no attribute 'instal'"):
        flax_ckpt_compat.instal  # noqa: B018


def test_importing_loads_nothing_heavy() -> None:
    """Neither the package nor install_on_import() loads jax, flax, numpy, tensorstore, a backend or the CLI."""
    for statement in (
        "import flax_ckpt_compat",
        "from flax_ckpt_compat import _patching; _patching.install_on_import()",
    ):
        loaded = modules_after(statement)
        assert not loaded & HEAVY
        assert not {name for name in loaded if name.startswith("flax_ckpt_compat.") and "_patching" not in name}


def test_neither_format_needs_tensorstore(tmp_path: Path) -> None:
    """Saving and restoring loads neither tensorstore nor orbax, nor msgpack's users the other backend."""
    loaded = modules_after(
        "import numpy, sys, flax_ckpt_compat as f\n"
        "for format, compression in (('msgpack', None), ('orbax', None), ('orbax', 'zstd')):\n"
        f"    path = {str(tmp_path)!r} + f'/{{format}}{{compression}}'\n"
        "    f.save(path, {'a': numpy.ones(9000)}, format=format, compression=compression)\n"
        "    f.restore(path)\n"
        "    print(*(f'{format}:{name}' for name in sys.modules))"
    )
    assert not {module for module in loaded if module.split(".")[0] in ("tensorstore", "orbax")}
    assert "msgpack:flax_ckpt_compat.legacy" in loaded and "orbax:flax_ckpt_compat.orbax_backend" in loaded
    assert "msgpack:flax_ckpt_compat.orbax_backend" not in loaded


def test_every_package_is_listed() -> None:
    """Each folder with modules is in setup.cfg, which lists packages by hand."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(config["options"]["packages"].split())
    mapped = dict(line.split(" = ") for line in config["options"]["package_dir"].strip().splitlines())
    found = {
        ".".join([name, *file.parent.relative_to(ROOT / folder).parts])
        for name, folder in mapped.items()
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "sitecustomize.py"  # imported by its name from a folder on Python's path
    }
    assert found == listed


def test_signatures_are_those_of_the_list() -> None:
    """A changed signature is announced in the changelog, without which the list is not written anew."""
    listed = public_signatures.FILE.read_text(encoding="utf-8").splitlines()
    found = public_signatures.public_signatures()
    changes = [f"- {line}" for line in listed if line not in found] + [
        f"+ {line}" for line in found if line not in listed
    ]
    assert not changes, "\n".join([*changes, "If this is meant: python -m tests.public_signatures"])
