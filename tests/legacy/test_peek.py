"""Looking ahead in few bytes finds the same leaves, and reads little."""

from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization
from flax_ckpt_compat.legacy.reader import MsgpackReader
from flax_ckpt_compat.legacy.sequential_reader import last_key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import open_checkpoint
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.steps import ARRAYS_PLACEHOLDER
from flax_ckpt_compat._core.tree import iter_leaves, map_leaves
from tests.support.profiles import examples
from tests.support.samples import fingerprint

NAMES = st.text("ab_é/", min_size=1, max_size=40)
ARRAYS = st.tuples(st.sampled_from([0, 1, 300, 700, 1200, 2500, 9000]), st.sampled_from(["f4", "i1", "bool", "f8"]))
LEAVES = st.one_of(
    ARRAYS.map(lambda pair: np.full((pair[0], 1, 1), 1, pair[1])),
    st.integers(-5, 2**40),
    # Such a text refers to a folder of arrays; hypothesis takes texts from the source.
    st.text(max_size=300).filter(lambda text: not text.startswith(ARRAYS_PLACEHOLDER)),
    st.binary(max_size=300),
    st.none(),
    st.just(np.float32(2)),
    st.just(1 + 2j),
)
TREES = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=18), max_leaves=30)


@settings(max_examples=examples(150, 4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(NAMES, TREES, max_size=18))
def test_files_of_flax_read_alike(tree: Any, tmp_path: Path) -> None:
    """Whatever lies behind an array, large or small, is read as real Flax reads it."""
    path = tmp_path / "file"
    path.write_bytes(serialization.to_bytes(tree))
    reader = MsgpackReader(location_of(path))
    handles = [leaf for _, leaf in iter_leaves(reader.tree) if hasattr(leaf, "read")]
    values = dict(zip(map(id, handles), reader.read(handles), strict=True))
    read = map_leaves(lambda _, leaf: values.get(id(leaf), leaf), reader.tree)
    assert fingerprint(_plain(read)) == fingerprint(serialization.msgpack_restore(path.read_bytes()))


def _plain(node: Any) -> Any:
    return {name: _plain(child) for name, child in node.children.items()} if hasattr(node, "children") else node


def test_opening_a_file_of_large_arrays_reads_little(tmp_path: Path) -> None:
    """The structure of 600 arrays of 10 kB each is known after reading less than a fortieth of the file."""
    tree = {f"layer_{n}": {"kernel": np.ones(1500), "bias": np.ones(1000)} for n in range(300)}
    path = tmp_path / "file"
    path.write_bytes(serialization.to_bytes(tree))
    before = _bytes_read()
    with open_checkpoint(path) as opened:
        assert len(opened.leaves()) == 600
    assert _bytes_read() - before < path.stat().st_size / 40


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_is_no_array_of_flax_is_not_looked_ahead_in() -> None:
    """Text, numbers, other extensions, long maps and cut headers give -1: the usual window follows."""
    header = serialization.msgpack_serialize({"k": np.ones(3, np.float32)})[1:]
    assert last_key(header) == 0
    nested = b"\xa1a\x81" + header
    assert last_key(nested) == 3
    for cut in range(len(header) - 12):
        assert last_key(header[:cut]) == -1
    for other in (b"\xa1k\xa3abc", b"\xa1k\x05", b"\xa1k\xde\x00\x20", b"\xd9\x40k", b"\xa1k\xc7\x05\x03\x93", b""):
        assert last_key(other + bytes(40)) == -1
