"""Containers of Python values are decoded at once, and get a handle for each value only where something asks for it."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import msgpack
import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints
from flax_ckpt_compat.legacy import BACKEND, format, parse, reader, value_runs
from flax_ckpt_compat.legacy.sequential_reader import Window
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, rules
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from tests.legacy.test_unpack import describe
from tests.support.profiles import examples
from tests.support.trees import fingerprint

_NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.integers(0, 127), st.floats(allow_nan=False), st.booleans(), st.none()
)
_OTHERS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["long " * 60, "ü" * 300, "x" * 70_000]),
    st.binary(max_size=3),
    st.complex_numbers(allow_nan=False),
)
_VALUES = st.one_of(_NUMBERS, _NUMBERS, _OTHERS, st.just(np.arange(5.0)), st.just(np.float32(2)))


def _rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Short lists and dicts of anything, and long ones of few numbers, repeated."""
    runs = st.tuples(st.lists(_NUMBERS, min_size=1, max_size=3), st.integers(6, 20)).map(lambda pair: pair[0] * pair[1])
    named = runs.map(lambda row: {f"k{n}": value for n, value in enumerate(row)})
    mixed = st.tuples(runs, st.lists(values, max_size=3)).map(lambda pair: [*pair[0], *pair[1]])
    return st.one_of(
        st.lists(values, max_size=4), st.dictionaries(st.text(max_size=3), values, max_size=4), runs, named, mixed
    )


_DOCUMENTS = st.dictionaries(st.text(max_size=4), st.recursive(_VALUES, _rows, max_leaves=12), max_size=5)


def _write(path: Path, document: Any) -> Path:
    path.write_bytes(flax.serialization.msgpack_serialize(document))
    return path


@given(document=_DOCUMENTS)
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.data_too_large])
def test_as_flax_and_as_value_by_value(scratch: Callable[[], Path], document: Any) -> None:
    """Both ways to decode runs restore what Flax does, and leaves are those that are found one by one."""
    path = _write(scratch(), document)
    expected = fingerprint(flax.serialization.msgpack_restore(path.read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        assert fingerprint(checkpoints.restore_checkpoint(path, None)) == expected
        patch.setattr(reader, "unpack", lambda *_: None)
        assert fingerprint(checkpoints.restore_checkpoint(path, None)) == expected
        described = describe(BACKEND.open(location_of(path)))
        patch.setattr(parse, "_MIN_RUN", 2**40)
        assert describe(BACKEND.open(location_of(path))) == described
        assert fingerprint(checkpoints.restore_checkpoint(path, None)) == expected
    path.unlink()


_ONE_OF_EACH = [True, 2, 2.5, 1j, "text", b"by", None]
# As numpy holds numbers, and characters and bytes as such.
_NBYTES = dict(zip(_ONE_OF_EACH, [1, 8, 8, 16, 4, 2, 0], strict=True))


@pytest.mark.parametrize("of", [list, lambda values: dict(zip("ab", values, strict=True))], ids=["list", "dict"])
def test_a_run_takes_what_its_values_take(of: Callable[[Any], Any]) -> None:
    """Of one type or of two."""
    for values in itertools.product(_ONE_OF_EACH, repeat=2):
        branch = value_runs.branch_of(of(values), (), lambda *_: None)
        assert branch is not None and branch.run is not None
        assert branch.run.nbytes == sum(_NBYTES[one] for one in values)


@pytest.mark.parametrize(
    "values", [[], {}, [1, np.float32(2)], [1, [2]], [format.PLACEHOLDER], {"a": 1, "b": format.PLACEHOLDER + "b"}]
)
def test_what_is_no_run(values: Any) -> None:
    """Nothing, arrays, other containers, and references to arrays of several processes, which are text in the file."""
    assert value_runs.branch_of(values, (), lambda *_: None) is None


@pytest.mark.parametrize("takes", ["small files", "large files"])
def test_a_reference_among_numbers(takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an array that is not there, and never its text."""
    if takes == "large files":
        monkeypatch.setattr(reader, "unpack", lambda *_: None)
    path = _write(tmp_path / "checkpoint_1", {"a": [*range(5_000), format.PLACEHOLDER + "a/5000"]})
    with pytest.raises(CorruptCheckpointError, match=r"no array .*checkpoint_1_gda/a/5000"):
        flax_ckpt_compat.restore(path)


@given(document=_DOCUMENTS, cut=st.floats(0, 1), flip=st.integers(0, 255), at=st.floats(0, 1))
@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.data_too_large])
def test_damaged_files(scratch: Callable[[], Path], document: Any, cut: float, flip: int, at: float) -> None:
    """What is refused value by value is refused, in the same words; what is not reads the same."""
    path = _write(scratch(), document)
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= flip
    path.write_bytes(data[: max(1, round(cut * 2 * len(data)))])
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "unpack", lambda *_: None)
        for least in (parse._MIN_RUN, 2**40):
            patch.setattr(parse, "_MIN_RUN", least)
            try:
                outcomes.append(describe(BACKEND.open(location_of(path))))
            except CorruptCheckpointError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    path.unlink()


_TREES: dict[str, Any] = {
    "list": {"a": [7] * 100_000},
    "dict": {"a": {f"k{n}": n for n in range(50_000)}},
    "mixed": {"a": [1, "x", None, 2.5, True] * 20_000},
    "lists in a list": {"a": [[n] * 500 for n in range(200)]},
}


@pytest.mark.parametrize("takes", ["small files", "large files"])
@pytest.mark.parametrize("document", _TREES.values(), ids=_TREES)
def test_memory_is_that_of_flax(document: Any, takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 0.1 MB of one-byte ints took 55 MB, Flax 1 MB."""
    path = _write(tmp_path / "file", document)
    if takes == "large files":
        monkeypatch.setattr(reader, "unpack", lambda *_: None)
    checkpoints.restore_checkpoint(path, None)  # what is loaded once

    def peak(restore: Callable[..., Any]) -> int:
        tracemalloc.start()
        try:
            restored = restore(os.fspath(path), None)
            assert restored == document
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    flax_checkpoints.restore_checkpoint(os.fspath(path), None)
    assert peak(checkpoints.restore_checkpoint) < 4 * peak(flax_checkpoints.restore_checkpoint) + 2**20


@pytest.mark.parametrize("target", [None, {"n": {f"k{n}": 0 for n in range(20)}, "l": [0] * 30, "w": np.zeros(2)}])
def test_the_result_is_the_callers_own(target: Any, tmp_path: Path) -> None:
    """Changing it changes no other result, with the values of another open checkpoint neither."""
    tree = {"n": {f"k{n}": n for n in range(20)}, "l": list(range(30)), "w": np.ones(2)}
    path = _write(tmp_path / "file", tree)
    with flax_ckpt_compat.open_checkpoint(path) as view:
        for _ in range(2):
            restored = checkpoints.restore_checkpoint(path, target)
            assert fingerprint(restored) == fingerprint(tree)
            restored["n"]["k3"], restored["l"][4] = "changed", "changed"
            read = view.read()
            assert fingerprint(read) == fingerprint(tree)
            read["n"].clear()
            read["l"].clear()


def test_a_target_with_other_names_or_types(tmp_path: Path) -> None:
    """Only a target that is alike, in order too, takes a run whole: all others are matched leaf by leaf."""
    path = _write(tmp_path / "file", {"n": {f"k{n}": n for n in range(20)}})
    names = [f"k{n}" for n in range(20)]
    backwards = {"n": dict.fromkeys(reversed(names), 0)}
    restored = checkpoints.restore_checkpoint(path, backwards)
    assert list(restored["n"].items()) == [(f"k{n}", n) for n in range(19, -1, -1)]
    arrays = {"n": {**dict.fromkeys(names, 0), "k4": np.zeros((), np.int64)}}
    plan = flax_ckpt_compat.plan_restore(path, arrays)
    assert [leaf.path for leaf in plan.leaves] == [f"n/{name}" for name in names]
    with pytest.raises(flax_ckpt_compat.errors.MissingLeavesError, match="n/k20"):
        checkpoints.restore_checkpoint(path, {"n": dict.fromkeys([*names, "k20"], 0)})
    with pytest.raises(flax_ckpt_compat.errors.KindMismatchError):
        flax_ckpt_compat.restore(path, {"n": {**dict.fromkeys(names, 0), "k4": "text"}})


@pytest.mark.parametrize(
    "target", [None, {"n": {f"k{n}": 0 for n in range(20)}, "l": [0] * 30}, {"n": None, "l": None}]
)
def test_plans_list_each_value(target: Any, tmp_path: Path) -> None:
    """A plan has the same leaves as where every value has a handle, as in Orbax's format."""
    tree = {"n": {f"k{n}": n for n in range(20)}, "l": list(range(30))}
    flax_ckpt_compat.save(tmp_path / "msgpack", tree, step=1, format="msgpack")
    flax_ckpt_compat.save(tmp_path / "orbax", tree, step=1, format="orbax")
    plans = [flax_ckpt_compat.plan_restore(tmp_path / name, target) for name in ("msgpack", "orbax")]
    assert len(plans[0].leaves) == (50 if target is None or target["n"] else 2)
    listed = [sorted((leaf.path, sorted(leaf.sources)) for leaf in plan.leaves) for plan in plans]
    assert listed[0] == listed[1]


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_rules_add_to_a_run(format: Any, tmp_path: Path) -> None:
    """A leaf that a rule moves among Python values is there beside them, and they are unchanged where they were."""
    numbers = {f"k{n}": n for n in range(20)}
    flax_ckpt_compat.save(tmp_path, {"n": numbers, "extra": {"w": np.ones(2), "v": 5}}, step=1, format=format)
    restored = flax_ckpt_compat.restore(tmp_path, transforms=[rules.rename("extra", "n")])
    assert fingerprint(restored) == fingerprint({"n": {**numbers, "w": np.ones(2), "v": 5}})
    kept = flax_ckpt_compat.restore(tmp_path, transforms=[rules.rename("n", "m")])
    assert fingerprint(kept["m"]) == fingerprint(numbers)


def test_no_value_is_decoded_at_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in lists, each with some numbers before it: the work is that of the file, not of file and depth."""
    given = list[int]()
    ahead = Window.ahead

    def counted(window: Window) -> Any:
        for piece in ahead(window):
            given.append(len(piece))
            yield piece

    monkeypatch.setattr(Window, "ahead", counted)
    monkeypatch.setattr(reader, "unpack", lambda *_: None)
    document: Any = [0] * 20
    for _ in range(150):
        document = [*([1] * 60), document, *([2] * 60)]
    path = tmp_path / "file"
    path.write_bytes(msgpack.packb({"a": document}))
    BACKEND.open(location_of(path))
    assert sum(given) < 30 * path.stat().st_size


@pytest.mark.parametrize("before", [0, 3, 1000])
def test_an_array_behind_numbers_is_not_read(before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening skips the data of an array, wherever it is among Python values."""
    tree = {f"n{n:04}": n for n in range(before)} | {f"z{n}": np.zeros(2**20, np.float32) for n in range(16)}
    path = _write(tmp_path / "file", tree)
    read, real = list[int](), os.pread
    monkeypatch.setattr(os, "pread", lambda *given: read.append(given[1]) or real(*given))
    BACKEND.open(location_of(path))
    assert sum(read) < path.stat().st_size / 50
