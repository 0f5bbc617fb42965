"""Checkpoints of real old releases with the values that were saved, and what those releases lost."""

import base64
import dataclasses
import functools
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.samples import fingerprint

ARCHIVES = Path(__file__).parents[1] / "data" / "corpus"
# Orbax up to 0.5.7 stored these as None, which is what real Orbax gives back.
LOST = ("npscalar_bool", "npscalar_bf16", "py_complex")
# jax 0.4 called threefry by its short name in what the corpus' script wrote down.
_IMPLEMENTATIONS = {"fry": "threefry2x32"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One case: its archive, and its directory in it."""

    release: str
    name: str

    def __str__(self) -> str:
        return f"{self.release}:{self.name}"

    @property
    def family(self) -> str:
        """What wrote it."""
        return self.name.split("/")[0]

    @property
    def orbax(self) -> tuple[int, ...]:
        """Version of orbax-checkpoint; () for Flax's msgpack files."""
        match = re.search(r"orbax-([\d.]+)$", self.release)
        return () if match is None or self.family in ("legacy_msgpack", "gda") else _version(match[1])

    @property
    def flax(self) -> tuple[int, ...]:
        """Version of Flax."""
        return _version(re.match(r"flax-([\d.]+)", self.release)[1])  # type: ignore[index]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@functools.cache
def cases() -> list[Case]:
    """All cases of all archives, as they are listed beside them: to list archives takes each process a second."""
    lines = (ARCHIVES / "cases.txt").read_text(encoding="utf-8").splitlines()
    return [Case(*line.split(":", 1)) for line in lines]


def cases_in(archive: Path) -> list[Case]:
    """The cases that an archive holds."""
    release = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        names = [name.rpartition("/")[0] for name in tar.getnames() if name.endswith("/meta.json")]
    return [Case(release, name.removeprefix(f"{release}/")) for name in sorted(names)]


def parameters(chosen: Iterable[Case], *, oldest: bool = True) -> list[Any]:
    """Cases as parameters of a test; slow are all but the oldest, if asked for, and the newest release of each."""
    releases: dict[str, list[Case]] = {}
    for case in sorted(cases(), key=lambda case: (case.flax, case.orbax)):
        releases.setdefault(case.name, []).append(case)
    ends = {case for one in releases.values() for case in (one[0], one[-1])[not oldest :]}
    return [pytest.param(case, id=str(case), marks=() if case in ends else pytest.mark.slow) for case in chosen]


def unpack(release: str, into: Path) -> Path:
    """Unpacks an archive, once, and returns its directory; processes may share the folder."""
    if not (into / release).exists():
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into) as new:
            # Python takes three times as long.
            subprocess.run(["tar", "-xzf", ARCHIVES / f"{release}.tar.gz", "-C", new], check=True)
            with suppress(OSError):  # another process was quicker
                os.rename(Path(new, release), into / release)
    return into / release


def read(case: Case, into: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The path of a case, unpacked; what was saved there, by key path; and what else is known about it."""
    folder = unpack(case.release, into) / case.name
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return folder / "ckpt" / meta["ckpts"][0], expected, meta


def expected_value(entry: dict[str, Any]) -> Any:
    """The value that an entry of ``expected.json`` stands for."""
    kind = entry["kind"]
    if kind == "none":
        return None
    if kind == "empty_dict":
        return {}
    if kind == "py":
        return _python_value(entry)
    dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
    array = np.frombuffer(base64.b64decode(entry["data"]), dtype).reshape(entry["shape"]).copy()
    if kind == "prng_key":
        return jax.random.wrap_key_data(jnp.asarray(array), impl=_IMPLEMENTATIONS.get(entry["impl"], entry["impl"]))
    return array[()] if kind == "npscalar" else array


def _python_value(entry: dict[str, Any]) -> Any:
    value = entry["value"]
    if entry["type"] == "bytes":
        return base64.b64decode(value)
    if entry["type"] == "complex":
        return complex(*(float(part) for part in value))
    return {"int": int, "float": float, "bool": bool, "str": str}[entry["type"]](value)


def flatten(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Leaves and empty containers of a state dict by their path joined with ``/``."""
    if isinstance(tree, list | tuple):
        tree = {str(index): child for index, child in enumerate(tree)}
    if not isinstance(tree, dict) or not tree:
        yield "/".join(path), tree
        return
    for name, child in tree.items():
        yield from flatten(child, (*path, str(name)))


def difference(case: Case, path: str, entry: dict[str, Any], got: Any, *, with_target: bool) -> str | None:
    """What is wrong with a restored leaf, or None; what the writer lost or did not record is not wrong."""
    want = expected_value(entry)
    if case.orbax and case.orbax <= (0, 5, 7) and path in LOST:
        want = None
    # optax's EmptyState has no children, and so no marker of its own in Orbax's format.
    if entry["kind"] == "empty_dict" and case.orbax and "opt_state" in path.split("/"):
        return None if got is None or fingerprint(want) == fingerprint(got) else f"expected nothing, got {got!r}"
    # Flax from 0.3 to 0.8.5 stored Python's complex as numpy's.
    if not case.orbax and (0, 3) <= case.flax < (0, 9) and type(want) is complex:
        want = np.complex128(want)
    if entry["kind"] == "npscalar" and case.orbax and not with_target and want is not None:
        # Orbax has no numpy scalars of its own: the number and its dtype come back, the kind may be another.
        return (
            None if fingerprint(np.asarray(want)) == fingerprint(np.asarray(got)) else f"expected {want!r}, got {got!r}"
        )
    return None if fingerprint(want) == fingerprint(got) else f"expected {want!r}, got {got!r} of {type(got).__name__}"
