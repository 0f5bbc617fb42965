"""Fuzzing that coverage guides: ``python -m tests.reliability.guided --seconds 600`` (needs ``pip install atheris``).

Each input takes the place of one file of a checkpoint: msgpack, or Orbax's format with and without a database. What
restores it may return a value or raise an error of ours; else libFuzzer stops, and keeps the input.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

# What reads files; the library itself imports the formats on first use, which would be too late.
with atheris.instrument_imports(
    include=[f"flax_ckpt_compat.{name}" for name in ("legacy", "orbax_backend", "_discovery", "_core")]
):
    for name in ("legacy", "orbax_backend"):
        importlib.import_module(f"flax_ckpt_compat.{name}.reader")
    from flax_ckpt_compat import checkpoints, config
    from flax_ckpt_compat._core import checksums, orbax_layout
    from flax_ckpt_compat.errors import CheckpointError
from tests.reliability import damage, fuzz
from tests.reliability.workloads import SYSTEMS

_MAX_BYTES = 1 << 15
_SECONDS, _MEGABYTES = 20, 4000  # that one input may take


def main() -> None:
    """Write the checkpoints and the corpus, and fuzz until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.guided", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--only", default="", help="fuzz only files whose path has this in it")
    parser.add_argument("--keep", default="", help="prefix of the paths of inputs that fail; else the current folder")
    parser.add_argument("--replay", help="an input that failed, with the same --only")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        _fuzz(options)
        return
    # libFuzzer ends its process without cleaning up.
    with tempfile.TemporaryDirectory(prefix="guided-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        command = [sys.executable, "-m", "tests.reliability.guided", *sys.argv[1:], "--folder", folder]
        sys.exit(subprocess.run(command, check=False).returncode)


def _fuzz(options: argparse.Namespace) -> None:
    logging.disable(logging.CRITICAL)
    files, corpus = _write_checkpoints(options.folder, options.only), Path(options.folder, "corpus")
    corpus.mkdir()
    seeds = [bytes([number, mode]) + file.read_bytes() for number, file in enumerate(files) for mode in range(4)]
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        # libFuzzer keeps one of all files that restore well. So half of the inputs are made from the others.
        return bytes(atheris.Mutate(seeds[seed // 2 % len(seeds)] if seed % 2 else data, max_size))

    flags = [f"-max_total_time={options.seconds}", f"-max_len={_MAX_BYTES}", f"-rss_limit_mb={_MEGABYTES}"]
    flags += [f"-timeout={_SECONDS}", "-len_control=0", "-print_final_stats=1", f"-artifact_prefix={options.keep}"]
    inputs = options.replay or str(corpus)
    atheris.Setup([sys.argv[0], *flags, inputs], _restorer(options.folder, files), custom_mutator=mutate)
    atheris.Fuzz()


def _write_checkpoints(folder: str, only: str) -> Sequence[Path]:
    """Return the files of small checkpoints that may be replaced."""
    import orbax.checkpoint as ocp

    for number, system in enumerate(SYSTEMS[:2]):
        damage.save(system, f"{folder}/{number}", damage.small)
    tree = {"a": [1.5, 2], "b": {"c": "text"}}
    for name, how in (("loose", {"use_ocdbt": False}), ("zarr3", {"use_zarr3": True})):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)).save(f"{folder}/{name}/checkpoint_1", tree)
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size)
    return [path for path in found if only in str(path)][:256]


def _restorer(folder: str, files: Sequence[Path]) -> Callable[[bytes], None]:
    contents = [file.read_bytes() for file in files]

    def restore(data: bytes) -> None:
        if len(data) < 2:
            return
        number, content = data[0] % len(files), data[2:]
        file = files[number]
        file.write_bytes(_sealed(file.name, content) if data[1] % 2 else content)
        config.update("checksums", "off" if data[1] & 2 else "verify")
        try:
            checkpoints.restore_checkpoint(os.path.join(folder, file.relative_to(folder).parts[0]), None)
        except CheckpointError:
            pass
        finally:
            file.write_bytes(contents[number])

    return restore


def _sealed(name: str, content: bytes) -> bytes:
    """Return content whose checksums are right, so that readers get past them."""
    if name == orbax_layout.CHECKSUMS:
        body = content[: -checksums.SUM_BYTES]
        return body + checksums.crc32(body).to_bytes(checksums.SUM_BYTES, "little")
    return fuzz._sealed(content)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
