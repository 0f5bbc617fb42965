"""Hostile directories: metadata that lies is found out before memory is asked for or a foreign file is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.orbax_backend.files import ByteRange
from flax_ckpt_compat.orbax_backend.ocdbt import read_entries
from flax_ckpt_compat.orbax_backend.ocdbt_encode import encode_index

from flax_ckpt_compat import checkpoints, open_checkpoint, plan_restore, restore, verify
from flax_ckpt_compat._core.backend import LeafKind
from flax_ckpt_compat._core.errors import CorruptCheckpointError, KindMismatchError, UnrecognizedFormatError
from flax_ckpt_compat._core.location import location_of
from tests.support.orbax_trees import change_metadata, load, save

MARKER = {"value_type": "None", "skip_deserialize": True}


def _marked(leaves: Any = None, containers: Any = ()) -> dict[str, Any]:
    """Changes of ``_METADATA``: annotations of ours."""
    return {"custom_metadata": {"flax_ckpt_compat": {"format": 1, "leaves": leaves or {}, "containers": containers}}}


def _entry(*keys: tuple[Any, int], value: Any = MARKER) -> dict[str, Any]:
    return {"key_metadata": [{"key": key, "key_type": kind} for key, kind in keys], "value_metadata": value}


def _with_b(files: Path, **value_of_a: Any) -> None:
    """Puts the sound array ``b`` beside ``a``, and perhaps changes what is said of ``a``."""
    shutil.copytree(files / "a", files / "b")
    metadata = json.loads((files / "_METADATA").read_text())["tree_metadata"]
    metadata["('b',)"] = json.loads(json.dumps(metadata["('a',)"]).replace('"a"', '"b"'))
    metadata["('a',)"]["value_metadata"] |= value_of_a
    change_metadata(files, tree_metadata=metadata)


def _zarray(path: Path, **changes: Any) -> None:
    """Changes the metadata of the array ``a`` in a checkpoint of separate files."""
    file = path / "a" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A checkpoint of the one compressed array ``a``, each key in a file."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "c", args=ocp.args.PyTreeSave({"a": np.arange(4000.0)}))
    return tmp_path / "c"


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2**50], "chunks": [2**50]},
        {"shape": [2**50], "chunks": [2**50], "compressor": None},
        {"shape": [2**61], "chunks": [1]},
        {"shape": [2**40, 2**40], "chunks": [1, 1]},
        {"shape": [2**40, 2**40, 0], "chunks": [1, 1, 1]},
        {"shape": [-4000], "chunks": [4000]},
        {"shape": [4000], "chunks": [0]},
        {"shape": [4000], "chunks": []},
        {"shape": [1] * 100, "chunks": [1] * 100},
        {"shape": [4000.0]},
        {"shape": True},
        {"shape": None},
        {"shape": [3000], "compressor": None, "chunks": [3000]},
        {"dtype": None},
        {"dimension_separator": "x"},
        {"compressor": {"id": "gzip", "level": 1}},
        {"chunks": [2**50], "compressor": {"id": "gzip", "level": 1}},
        {"chunks": [2**50]},
        {"zarr_format": 3},
    ],
    ids=repr,
)
def test_array_metadata_that_lies_is_found_out(files: Path, changes: dict[str, Any]) -> None:
    """Sizes that the stored bytes cannot have, and types that cannot be, are errors before memory is asked for."""
    _zarray(files, **changes)
    with pytest.raises(CorruptCheckpointError, match="'a'"):
        load(files)


UNSUPPORTED: list[dict[str, Any]] = [
    {"dtype": "|O"},
    {"dtype": "<U4"},
    {"dtype": [["a", "<f4"]]},
    {"compressor": {"id": "nonsense"}},
    {"compressor": None, "filters": [{"id": "delta", "dtype": "<f8"}]},
]


@pytest.mark.parametrize("changes", UNSUPPORTED, ids=repr)
def test_what_is_not_supported_is_no_damage(files: Path, changes: dict[str, Any]) -> None:
    """An array of an unknown dtype, codec or filter is an error that names it, and hides nothing else."""
    _with_b(files)
    _zarray(files, **changes)
    _check_only_one_is_refused(files)


def _check_only_one_is_refused(path: Path) -> None:
    """Checks that the leaf ``a`` is unsupported, and ``b`` is read beside it, in every way."""
    for target in (None, {"a": np.zeros(4000)}):
        with pytest.raises((UnrecognizedFormatError, KindMismatchError), match=r"\ba\b") as caught:
            restore(path, target)
        assert not isinstance(caught.value, CorruptCheckpointError)
    assert np.array_equal(restore(path, {"b": np.zeros(4000)})["b"], np.arange(4000.0))
    with open_checkpoint(path) as opened:
        assert list(opened.read("b")) == ["b"]
    assert plan_restore(path, {"b": np.zeros(4000)})
    found = verify(path)
    assert {leaf.path: leaf.state for leaf in found.checkpoints[0].leaves} == {"a": "unreadable", "b": "unverified"}


_NO_TREES = [
    [_entry((1, 2))],
    [_entry(("a", 7))],
    [_entry(("a", 2), value={"value_type": []})],
    [_entry(("l", 2), ("0", 1)), _entry(("l", 2), ("2", 1))],  # a gap
    [_entry(("l", 2), ("01", 1))],
    [_entry(("l", 2), ("x", 1))],
    [_entry(("l", 2)), _entry(("l", 2), ("a", 2))],  # a leaf that is a branch
    [_entry(("l", 2), ("a", 2)), _entry(("l", 2))],
    [_entry(("l", 2)), _entry(("l", 2))],
    [_entry(), _entry(("l", 2))],
]
_MARKS: list[dict[str, Any]] = [
    *({"kind": kind.value} for kind in LeafKind if kind is not LeafKind.ARRAY),
    *({"kind": "prng key", "impl": impl} for impl in ("threefry2x32", "rbg", "nobody's")),
    {"kind": "x"},
    {"dtype": "O"},
    {"dtype": "<U9"},
]


@pytest.mark.parametrize(
    "changes",
    [
        {"tree_metadata": None},
        {"tree_metadata": []},
        {"tree_metadata": {"x": None}},
        {"tree_metadata": {"x": {"key_metadata": 3, "value_metadata": {}}}},
        *({"tree_metadata": {str(at): one for at, one in enumerate(entries)}} for entries in _NO_TREES),
        {"custom_metadata": {"flax_ckpt_compat": None}},
        {"custom_metadata": {"flax_ckpt_compat": {"format": 1}}},
        _marked(containers=[[[[]], "tuple", []]]),
        "[" * 200_000,
        # No mark turns the 4000 stored float64 into a scalar, a text, a key, or what is no dtype of an array.
        *(_marked({"a": mark}) for mark in _MARKS),
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_tree_metadata_that_does_not_decode_is_an_error(files: Path, changes: Any) -> None:
    """Wrong types anywhere in `_METADATA` are told, with the file or the leaf; so is JSON of endless depth."""
    if isinstance(changes, str):
        (files / "_METADATA").write_text(changes)
    else:
        change_metadata(files, **changes)
    with pytest.raises(CorruptCheckpointError, match="_METADATA" if "tree_metadata" in changes else r"_METADATA|'a'"):
        load(files)


@pytest.mark.parametrize(
    ("data", "mark", "said"),
    [
        *(
            (data, {"kind": "prng key", "impl": impl}, f"PRNG key of '{impl}'")
            for impl, data in (
                ("threefry2x32", np.zeros(4, np.uint32)),
                ("unsafe_rbg", np.zeros(2, np.uint32)),
                ("rbg", np.uint32(0)),
                ("threefry2x32", np.zeros(2, np.int32)),
            )
        ),
        (np.array(1.5), {"kind": "int"}, "says int, but float64 is stored"),
        (b"\xff", {"kind": "str"}, "UTF-8"),
    ],
)
def test_marks_that_contradict_what_is_stored(data: Any, mark: dict[str, str], said: str, tmp_path: Path) -> None:
    """What jax or Python would refuse in words of its own is damage of the checkpoint that names the leaf."""
    path = Path(save(tmp_path / "c", {"a": data}))
    change_metadata(path, **_marked({"a": mark}))
    with pytest.raises(CorruptCheckpointError, match=f"'a'.*{said}"):
        restore(path)


@pytest.mark.parametrize("keys", [["b"], ["01"], ["1_0"], [1], [None], 3])
def test_keys_that_are_no_ints_are_an_error(keys: Any, tmp_path: Path) -> None:
    """Names that were ints are marked so, and are written as Python writes them: two never become one."""
    path = Path(save(tmp_path / "c", {"x": {"b": 1.0, "1": 2.0, "01": 3.0, "1_0": 4.0}}))
    change_metadata(path, **_marked(containers=[[["x"], "dict", keys]]))
    with pytest.raises(CorruptCheckpointError, match="type annotations"):
        restore(path)


def test_annotations_of_a_newer_release_are_not_guessed_at(files: Path) -> None:
    """The error says which format this release reads."""
    change_metadata(files, custom_metadata={"flax_ckpt_compat": {"format": 2}})
    with pytest.raises(UnrecognizedFormatError, match="format 1"):
        load(files)


def test_names_cannot_lead_out_of_the_directory(files: Path) -> None:
    """A leaf called ``../x`` in a checkpoint of separate files is not looked for."""
    metadata = json.loads((files / "_METADATA").read_text())
    metadata["tree_metadata"]["('a',)"]["key_metadata"][0]["key"] = "../secret"
    change_metadata(files, tree_metadata=metadata["tree_metadata"])
    shutil.copytree(files / "a", files.parent / "secret")
    with pytest.raises(CorruptCheckpointError, match="outside"):
        load(files)


@pytest.mark.parametrize("value_type", ["my.own.Handler", "jax.array", ""])
@pytest.mark.parametrize("skipped", [True, False])
def test_unknown_types_are_not_guessed_at(files: Path, value_type: str, skipped: bool) -> None:
    """Real Orbax refuses a type that it has no handler for, though an array of that name lies there; so do we."""
    _with_b(files, value_type=value_type, skip_deserialize=skipped)
    with pytest.raises(UnrecognizedFormatError, match=rf"'a' cannot .* of the type {value_type!r}") as caught:
        load(files)
    assert caught.value.leaf == "a"
    _check_only_one_is_refused(files)
    if not skipped:
        with pytest.raises(ValueError, match="TypeHandler"):
            ocp.PyTreeCheckpointer().restore(files)


@pytest.mark.parametrize(("offset", "length"), [(2**63, 8), (2**64 - 8, 8), (2**62, 8), (0, 2**40)])
def test_places_that_no_file_has_are_damage(tmp_path: Path, offset: int, length: int) -> None:
    """No memory is asked for; the index itself is sound, and readers, look-ups and reports say what is wrong."""
    path = tmp_path / "checkpoint_1"
    ocp.PyTreeCheckpointer().save(path, {"a": np.random.default_rng(0).random(4000)})
    entries = read_entries(location_of(str(path))).items()
    assert any(isinstance(value, ByteRange) for _, value in entries)
    lies = [
        (key, ByteRange(value.file, offset, length) if isinstance(value, ByteRange) else value)
        for key, value in entries
    ]
    nodes, manifest = encode_index(lies, name := f"d/{'0' * 32}")
    (path / name).write_bytes(nodes)
    (path / "manifest.ocdbt").write_bytes(manifest)
    with pytest.raises(CorruptCheckpointError):
        restore(path)
    assert checkpoints.latest_checkpoint(tmp_path) == str(path) and not verify(path).ok
