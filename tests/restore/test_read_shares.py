"""What tells two checkpoints with one path apart, for processes that read one together, and how arrays are cut."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat import checkpoints, config, errors, save
from flax_ckpt_compat._core.array_boxes import shape_of
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._restore import casting, execute, read_assignment
from flax_ckpt_compat._restore.match import plan_tree
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._trees import state_dict

MIB = 2**20


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_two_saves_of_one_tree(tmp_path: Path, use_ocdbt: bool) -> None:
    """Real Orbax saves the same names and shapes; the files that describe them may be equal byte for byte."""
    with ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt) as checkpointer:
        for number in (1, 2):
            checkpointer.save(tmp_path / str(number), {"w": np.full(5, number)})
            # The directory of an item, and releases before 0.6, have none.
            (tmp_path / str(number) / "_CHECKPOINT_METADATA").unlink()
    one, other = (read_assignment._identity(location_of(tmp_path / str(number))) for number in (1, 2))
    assert one != other
    assert read_assignment._identity(location_of(tmp_path / "1")) == one


def test_a_directory_of_nothing_known(tmp_path: Path) -> None:
    """No process takes it for another's."""
    assert read_assignment._identity(location_of(tmp_path)) != read_assignment._identity(location_of(tmp_path))


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((2048, 1024), np.float32, 256),  # a row has 4 KiB, and a block of checksums 1 MiB
        ((2000, 1024), np.float32, 256),
        ((8 * MIB,), np.int8, MIB),
        ((4096, 768), np.float32, 1024),  # 3 KiB: 1,024 rows are the least that are whole blocks
        ((5, 2 * MIB), np.int8, 1),
        ((2047, 1023), np.float32, None),
        ((1, 4 * MIB), np.int8, None),
        ((), np.float32, None),
    ],
)
def test_arrays_are_cut_where_blocks_end(
    tmp_path: Path, shape: tuple[int, ...], dtype: Any, rows: int | None, flag: bool
) -> None:
    """Rows are cut only where no block of checksums is; each row is in one part."""
    path = checkpoints.save_checkpoint(tmp_path, {"w": np.zeros(shape, dtype)}, 1)
    opened = Opened(location_of(path), verify=False)
    boxes = list(read_assignment._rows(opened.reader("").tree.children["w"], MIB))
    opened.discard()
    if rows is None:
        assert len(boxes) < 2
        return
    assert [box[0].start for box in boxes] == list(range(0, shape[0], rows))
    assert sum(shape_of(box)[0] for box in boxes) == shape[0]
    assert {shape_of(box)[1:] for box in boxes} == {shape[1:]}


@pytest.mark.parametrize("compression", ["crc32c", "zstd"])
def test_compressed_chunks_stay_whole(tmp_path: Path, compression: str) -> None:
    """Only all of one gives any of its values."""
    from flax_ckpt_compat import api

    with config.override(compression=compression):
        api.save(tmp_path / "c", {"w": np.zeros((2048, 1024), np.float32)}, format="orbax")
    opened = Opened(location_of(tmp_path / "c"), verify=False)
    assert len(list(read_assignment._rows(opened.reader("").tree.children["w"], MIB))) == 1
    opened.discard()


TREE = {
    "bf16": np.ones(5, ml_dtypes.bfloat16),
    "bool": np.ones(5, bool),
    "complex": np.ones(5, np.complex64),
    "float": np.ones(5, np.float32),
    "empty": np.ones((0, 5)),
    "text": "text",
    "texts": np.array(["a", "b"]),
    "dates": np.zeros(2, "M8[s]"),
    "number": 3,
}


class Whole:
    """What one process restores of a checkpoint with others, of whole arrays in host memory."""

    def __init__(
        self,
        path: str,
        monkeypatch: pytest.MonkeyPatch,
        here: int = 0,
        target: Any = None,
        *,
        agrees: bool = True,
        **settings: Any,
    ):
        """Open and plan it, as process ``here`` of two."""
        monkeypatch.setattr(read_assignment.jax, "process_count", lambda: 2)
        monkeypatch.setattr(read_assignment.jax, "process_index", lambda: here)
        with config.override(**settings) as found:
            options = RestoreOptions(found)
        self.reader = Opened(location_of(path), verify=True).reader("")
        tree = None if target is None else state_dict.TargetTree(target)
        self.plan = plan_tree(self.reader, self.reader.tree, tree, options, location_of(path))
        run = execute.ReadLeaves(self.plan)
        self.mapped, self.casts = run.mapped, run.casts_at_read
        self.shares = read_assignment.Shares(self.plan, run.reads, run.casts_at_read, run.mapped)
        self.shares.divide(agrees=agrees)

    def read(self) -> dict[Any, list[Any]]:
        """Read what this process is to; return what it exchanges, by process."""
        values = casting.read(self.reader, self.shares.own, self.shares.casts, self.mapped)
        ((group, arrays),) = self.shares.arrays(values).items()
        assert group == (0, 1)
        return arrays


def test_which_arrays_are_exchanged(tmp_path: Path, flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of numbers with elements; none that is mapped, or that a rule gives to several leaves."""
    path = checkpoints.save_checkpoint(tmp_path, TREE, 1)
    found = Whole(path, monkeypatch)
    names = {handle.path[-1]: handle for _, handle in read_assignment._exchangeable(found.plan, frozenset())}
    assert sorted(names) == ["bf16", "bool", "complex", "float"]
    mapped = {names["bool"]}
    left = {handle.path[-1] for _, handle in read_assignment._exchangeable(found.plan, mapped)}
    assert left == {"bf16", "complex", "float"}
    found.plan.leaves.append(dataclasses.replace(found.plan.leaves[0]))
    twice = found.plan.leaves[0].source.path[-1]  # type: ignore[union-attr]
    left = {handle.path[-1] for _, handle in read_assignment._exchangeable(found.plan, frozenset())}
    assert left == set(names) - {twice}


def test_casts_are_part_of_what_processes_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one casts before it sends, and another would after it got, the bytes differ."""
    path = checkpoints.save_checkpoint(tmp_path, {"w": np.ones(5, np.float32)}, 1)
    found = Whole(path, monkeypatch, target={"w": np.ones(5, np.float16)}, dtype="target")
    assert found.casts
    late = read_assignment.Shares(found.plan, list(found.casts), {}, found.mapped)
    assert late.signature != found.shares.signature
    again = Whole(path, monkeypatch, here=1, target={"w": np.ones(5, np.float16)}, dtype="target")
    assert again.shares.signature == found.shares.signature


def test_arrays_on_a_device_of_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two processes reads one of the two arrays once they agree, and both until then."""
    path = save(tmp_path / "c", {name: np.ones(700 << 10, np.int8) for name in "ab"}, format="msgpack")
    target = {name: jnp.zeros(700 << 10, jnp.int8) for name in "ab"}
    for here, own in enumerate("ab"):
        for agrees, expected in ((True, [own]), (False, ["a", "b"])):
            process = Whole(path, monkeypatch, here, target, agrees=agrees)
            assert [one.path[-1] for one in process.shares.own] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["first", "second"])
def test_blocks_that_two_processes_read_parts_of(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both verify them whole, so that damage in either part is an error of both."""
    path = save(tmp_path / "c", {name: np.ones(700 << 10, np.int8) for name in "ab"}, format="msgpack")
    for here, own in enumerate("ab"):
        process = Whole(path, monkeypatch, here)
        assert [one.path[-1] for one in process.shares.own] == [own]  # type: ignore[union-attr]
        assert [len(process.read()[number]) for number in (0, 1)] == [1, 1]
    # The first block of checksums, of 1 MiB, has all of the one and the beginning of the other.
    damaged(path, 100 << 10 if place == "first" else -660 << 10)
    for here in (0, 1):
        with pytest.raises(errors.ChecksumError):
            Whole(path, monkeypatch, here).read()


def test_blocks_that_only_one_process_reads_parts_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It verifies them; the other process has nothing to do with damage there."""
    tree = {"a": np.ones(700 << 10, np.int8), "m": "x" * (2 << 20), "z": np.ones(700 << 10, np.int8)}
    path = damaged(save(tmp_path / "c", tree, format="msgpack"), -(100 << 10))
    assert len(Whole(path, monkeypatch, here=0).read()[0]) == 1
    with pytest.raises(errors.ChecksumError):
        Whole(path, monkeypatch, here=1).read()


def damaged(path: str, at: int) -> str:
    """Change a byte of a file, without a trace in its status; return the path."""
    status = os.stat(path)
    if "user.flax_ckpt_compat.checksums" not in os.listxattr(path):
        pytest.skip("this file system has no extended attributes")
    with open(path, "r+b") as file:
        file.seek(at % status.st_size)
        file.write(b"\x07")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return path
