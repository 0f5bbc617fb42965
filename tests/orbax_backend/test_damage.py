"""Damaged and hostile directories: right values, or an error that says what is wrong; never zeros, never a hang.

Metadata that lies is found out before memory is asked for or a foreign file is read.
"""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.orbax_backend.files import ByteRange
from flax_ckpt_compat.orbax_backend.ocdbt import read_entries
from flax_ckpt_compat.orbax_backend.ocdbt_encode import encode_index

from flax_ckpt_compat import checkpoints, open_checkpoint, plan_restore, restore, verify
from flax_ckpt_compat._core.backend import LeafKind
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    KindMismatchError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.location import location_of
from tests.orbax_backend.conftest import WRITERS as REAL
from tests.orbax_backend.conftest import pytree
from tests.support.logs import warnings_logged
from tests.support.orbax_trees import change_metadata, database, load, on_host, save
from tests.support.peers import skip_without_typed_keys
from tests.support.profiles import examples
from tests.support.trees import fingerprint

TREE = {
    "big": np.arange(50_000.0),
    "mid": jnp.arange(3000.0),
    "small": np.arange(4),
    "text": "hello",
    "key": jax.random.key(1),
    "list": [1, {"x": 2.5}],
    "none": None,
}


WRITERS = {
    "ours": save,
    "ours zstd": lambda path, tree: save(path, tree, "zstd"),
    **{f"real {name}": REAL[name] for name in ("v0", "uncompressed", "files", "zarr3")},
}


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each writer, to be copied before it is damaged."""
    if request.param.startswith("real"):
        skip_without_typed_keys()
    path = tmp_path_factory.mktemp("written") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WRITERS[request.param](path, TREE)
    return path


def _names(error: CheckpointError, file: Path) -> bool:
    """Whether a message names a file, or else the folder in the checkpoint that it lies in."""
    return file.name in str(error) or (file.parent != Path() and str(file.parent) in str(error))


def _ends(data: bytes) -> Iterator[bytes]:
    """A file that is empty, half there, and there but for its last byte."""
    for length in {0, len(data) // 2, max(0, len(data) - 1)}:
        yield data[:length]


def _flips(data: bytes) -> Iterator[bytes]:
    """A file with a wrong bit somewhere."""
    rng = random.Random(len(data))
    for position in [rng.randrange(len(data)) for _ in range(examples(12, 4))] if data else ():
        yield data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: [None], pytest.param(_ends, marks=pytest.mark.slow), pytest.param(_flips, marks=pytest.mark.slow)],
    ids=["missing", "cut off", "flipped"],
)
def test_any_file_may_be_damaged(written: Path, tmp_path: Path, damage: Callable[[bytes], Any]) -> None:
    """The values are right all the same, or the error names the file, but for flips; lost key types are warned of."""
    for number, name in enumerate(sorted(file.relative_to(written) for file in written.rglob("*") if file.is_file())):
        copy = shutil.copytree(written, tmp_path / str(number))
        for wrong in damage((copy / name).read_bytes()):
            (copy / name).unlink() if wrong is None else (copy / name).write_bytes(wrong)
            with warnings_logged() as logged:
                try:
                    restored = load(copy)
                except CheckpointError as error:
                    assert damage is _flips or _names(error, name), (name, str(error))
                    continue
            if damage is not _flips and fingerprint(restored) != fingerprint(on_host(TREE)):
                assert wrong is None and "array_metadatas" in str(name)
                assert any("PRNG" in text and "key" in text for text in logged)


def test_our_keys_survive_the_loss_of_array_metadatas(tmp_path: Path) -> None:
    """Our annotations name PRNG keys too."""
    path = Path(save(tmp_path / "c", TREE))
    shutil.rmtree(path / "array_metadatas")
    assert fingerprint(load(path)) == fingerprint(on_host(TREE))


def test_keys_that_another_process_lists(tmp_path: Path) -> None:
    """Every process should list all arrays; where the first one does not, the others count."""
    skip_without_typed_keys()
    path, tree = tmp_path / "c", {"key": jax.random.key(1), "w": jnp.ones(3)}
    REAL["v0"](path, tree)
    file = path / "array_metadatas" / "process_0"
    listed = json.loads(file.read_text())["array_metadatas"]
    for number, name in enumerate(("w", "key")):
        mine = [one for one in listed if one["array_metadata"]["param_name"] == name]
        file.with_name(f"process_{number}").write_text(json.dumps({"array_metadatas": mine}))
    assert fingerprint(load(path)) == fingerprint(on_host(tree))


@pytest.mark.parametrize("size", [3, 50_000], ids=["in the index", "in a file"])
def test_a_value_that_is_missing_or_of_another_size(tmp_path: Path, size: int) -> None:
    """What is behind it, in memory or in the file, is not part of the array; even an array of zeros must be there."""
    path = save(tmp_path / "c", {"a": {"w": np.zeros(size)}, "b": np.ones(3)})
    store = database(path)
    wrong = [(bytes(found), rf"'a/w'.*{found} bytes, expected {8 * size}") for found in (8 * size - 16, 8 * size + 8)]
    for value, said in (*wrong, (None, r"a/w.*a\.w/0.*missing")):
        store["a.w/0"] = value
        with pytest.raises(CorruptCheckpointError, match=said) as caught:
            load(path)
        assert caught.value.leaf == "a/w"


@pytest.mark.parametrize("zarr3", [True, False])
def test_left_out_chunks_follow_the_convention_of_the_writer(tmp_path: Path, zarr3: bool) -> None:
    """Where chunks that equal a declared fill value were not stored they are that value; else they are missing.

    Of loose files that is told: they may as well have been lost, and empty directories tell nothing, because
    TensorStore makes them for chunks that it then does not store (Orbax 0.5.15, measured).
    """
    path = tmp_path / "c"
    pytree(use_ocdbt=False, use_zarr3=zarr3)(path, {"a": np.arange(6.0)})
    next(file for file in (path / "a").rglob("0")).unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        load(path)
    change_metadata(path, store_array_data_equal_to_fill_value=False)
    if not zarr3:
        with pytest.raises(CorruptCheckpointError, match="missing"):
            load(path)
    else:
        with warnings_logged() as logged:
            assert np.array_equal(load(path)["a"], np.zeros(6))
        assert any("['a']" in text for text in logged)


def test_unknown_entries_are_ignored(tmp_path: Path) -> None:
    """Later releases may say more, and optional files may be empty objects."""
    path = Path(save(tmp_path / "c", TREE))
    metadata = json.loads((path / "_METADATA").read_text())
    for entry in metadata["tree_metadata"].values():
        entry["new"] = {"x": 1}
        entry["value_metadata"]["new"] = [2]
    change_metadata(path, tree_metadata=metadata["tree_metadata"], brand_new={"a": 1})
    (path / "_sharding").write_text("{}")
    (path / "_CHECKPOINT_METADATA").write_text("[]")
    assert fingerprint(load(path)) == fingerprint(on_host(TREE))


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
