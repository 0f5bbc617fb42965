"""Fixtures for every folder of the tests."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.reliability import shim
from tests.support import interpreters, profiles, sharing_out

if TYPE_CHECKING:
    from tests.support.path_kinds import Builder
    from tests.support.saves import Save

# Without bytecode, every process of pytest-xdist and every program of the tests compiles the project anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
assert profiles.examples  # registers the profiles that are loaded here
_MEMORY = "/dev/shm"
_TEMPORARY_BYTES = 4 << 30  # more than there is at any time
# Jobs of a shell that is not interactive start with the signal ignored, and all programs of theirs inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Run all that ``-m`` says with all examples, and slow tests also where one is named on the command line."""
    if config.option.markexpr == "not slow" and any("::" in name for name in config.args):
        config.option.markexpr = ""
    is_quick = config.option.markexpr == "not slow"
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("quick" if is_quick else "full")
    if is_quick:  # most programs run once, and take a fourth less time if they are not optimized
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        if jax := sys.modules.get("jax"):  # the conftest of a folder that is named has imported it
            jax.config.update("jax_disable_most_optimizations", True)
        # XLA ends the process at a flag that it does not know: jaxlib 0.12 at this one, with which a small program
        # compiles in half of the time.
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
    # Half of the time would be waits for the disk, which the slow tests and CI's run of all see.
    if is_quick and _suits(_MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)


def _suits(folder: str) -> bool:
    """Return whether a folder has room, and extended attributes for checksums: tmpfs has them since Linux 6.6."""
    return shim.holds_attributes(folder) and shutil.disk_usage(folder).free > _TEMPORARY_BYTES


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep what XLA compiles; tests compile hundreds of small programs, which takes longer than to run them."""
    config = session.config
    # With jax 0.4.38 and 0.5.3, a program from its cache that is given donated arrays computes wrong values (measured).
    if config.pluginmanager.hasplugin("cacheprovider") and not metadata.version("jax").startswith(("0.4.", "0.5.")):
        folder = str(config.cache.mkdir("jax"))
        interpreters.COMPILATION_CACHE.update(
            JAX_COMPILATION_CACHE_DIR=folder, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"
        )
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        interpreters.start_zygote()  # that all its processes share; a run of all tests imports nothing long here
        return
    gc.disable()  # until all is collected, which leaves no garbage
    if interpreters.COMPILATION_CACHE:
        import jax

        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector the modules and tests, which stay until the end."""
    gc.freeze()
    if session.config.option.markexpr == "not slow":  # else what Orbax leaks would be told of other tests
        gc.set_threshold(20_000, 20, 20)  # by default, it takes a twentieth of the time of tests
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Share out the whole suite; what was chosen by hand starts sooner in one process."""
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    cores = len(os.sched_getaffinity(0))
    # One more: default tests also wait for servers and other processes. Each takes six seconds to start.
    return 0 if chosen else cores + (config.option.markexpr == "not slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the processes of default tests, which saves the time of their imports."""
    is_wanted = config.option.markexpr == "not slow" and sys.platform == "linux"
    for spec in (spec for spec in specs if is_wanted and spec.popen and not spec.python):
        spec.python = shlex.join([sys.executable, "-S", str(Path(__file__).with_name("support") / "worker.py")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run default tests of one file, or those that share what takes long to start, in one process."""
    return sharing_out.scheduler(config, log) if config.option.markexpr == "not slow" else None


@pytest.fixture(autouse=True)
def same_flag_afterwards() -> Iterator[None]:
    """Flax's flag is afterwards what it was before: no test finds that of another."""
    import flax

    before: Any = flax.config.flax_use_orbax_checkpointing
    yield
    flax.config.update("flax_use_orbax_checkpointing", before)


@pytest.fixture(params=[False, True], ids=["msgpack", "orbax"])
def flag(request: pytest.FixtureRequest) -> bool:
    """Each test once with Flax's flag off and once with it on."""
    import flax

    flax.config.update("flax_use_orbax_checkpointing", request.param)
    return request.param


@pytest.fixture(params=[False, True], ids=["msgpack", "orbax"])
def orbax(request: pytest.FixtureRequest) -> bool:
    """What Flax's flag shall be in other processes."""
    return bool(request.param)


@pytest.fixture(params=["msgpack", "orbax"])
def format(request: pytest.FixtureRequest) -> Any:
    """Each test once for each format of a save."""
    return request.param


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings as in a process that set none; what the test sets for the process goes with it."""
    from flax_ckpt_compat import config

    monkeypatch.setattr(config, "_process", {})


@pytest.fixture(params=["ours", "flax"])
def save(request: pytest.FixtureRequest) -> Save:
    """Our save_checkpoint and real Flax's."""
    import flax
    from flax.training import checkpoints as flax_checkpoints

    from flax_ckpt_compat import checkpoints
    from tests.support.saves import use_flag

    writers = {"ours": checkpoints.save_checkpoint, "flax": flax_checkpoints.save_checkpoint}

    def quiet(*args: Any, **kwargs: Any) -> str:
        with use_flag(flax.config.flax_use_orbax_checkpointing):
            return writers[request.param](*args, **kwargs)

    return quiet


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all processes of pytest-xdist unpack the archives of the corpus to, and only read."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "corpus"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that everybody may search, as ``tmp_path`` they may not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files can be written past the page cache."""
    from tests.support.disks import folder_on_disk

    with folder_on_disk(tmp_path) as folder:
        if folder is None:
            pytest.skip("no file system here can write past the page cache")
        yield folder


@pytest.fixture(scope="module")
def row_builder(tmp_path_factory: pytest.TempPathFactory, unpacked: Path) -> Builder:
    """What builds the rows of ``tests/data/path_kinds.toml``, for all tests of a file."""
    from tests.support.path_kinds import Builder

    return Builder(tmp_path_factory.mktemp("bases"), unpacked)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Flax's flag off, and no warnings: look-ups warn of most rows."""
    from tests.support.saves import use_flag

    with use_flag(False), caplog.at_level(logging.ERROR, "flax_ckpt_compat"):
        yield
