"""Build every kind of path that ``tests/data/path_kinds.toml`` lists: with real writers, then changed file by file."""

import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import os
import pickle
import shutil
import sqlite3
import struct
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import orbax.checkpoint as ocp
from flax import serialization
from jax.experimental.array_serialization import serialization as jax_serialization

import flax_ckpt_compat
from flax_ckpt_compat._core.local import temporaries
from tests.support import corpus
from tests.support.peers import ocp_v1, pytree_handler
from tests.support.samples import canonical
from tests.support.saves import set_aside

TABLE = Path(__file__).parents[1] / "data" / "path_kinds.toml"
GDA = TABLE.parent / "gda"
# Too large to be kept in the nodes of a database: then the tree needs the files of its process.
PARAMS = {"w": np.random.default_rng(6).random((20, 30), np.float32)}
TREE = {"params": PARAMS, "step": 6}
EMA = {"w": PARAMS["w"] + 100}
SMALL = {"params": {"w": np.arange(6, dtype=np.float32)}, "step": 6}
OLDER = {"params": {"w": np.full((2, 3), 5, np.float32)}, "step": 5}
NOTES = {"epoch": 3, "names": ["a", "b"]}
KEY_SEED = 7
_NOISE = np.random.default_rng(9).bytes(3000)
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of path, and what must hold of it; the columns are explained in the table."""

    name: str
    base: str
    at: str
    change: tuple[tuple[str, ...], ...]
    columns: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    @property
    def prefix(self) -> str:
        """The prefix of the directory of checkpoints that it lies in."""
        return "" if self["in_manager"] else "checkpoint_"

    @property
    def older(self) -> str:
        """The name of the complete step 5 beside it."""
        return f"{self.prefix}5"


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def kinds() -> dict[str, dict[str, Any]]:
    """Kind → its columns, unless a row says otherwise."""
    return _table()["kind"]  # type: ignore[no-any-return]


@functools.cache
def rows() -> list[Row]:
    """All rows of the table, those of the corpus once for each release."""
    table, found = _table(), []
    for line in [*table["row"], *itertools.chain.from_iterable(map(_of_releases, table["corpus"]))]:
        columns = {**table["every"], **table["kind"][line["kind"]], **line}
        change = tuple(tuple(step) for step in columns.pop("change", ()))
        name, base, at = columns.pop("name"), columns.pop("base"), columns.pop("at", None)
        if "writer" in columns:
            at = _ours(columns["writer"])
        found.append(Row(name, base, at or ("6" if columns["in_manager"] else "checkpoint_6"), change, columns))
    assert len({row.name for row in found}) == len(found)
    return found


def _of_releases(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each release that has the case; quick is the oldest: rows of the table are of today's."""
    line = dict(line)
    case, part = line.pop("case"), line.pop("part", "")
    having = sorted((one for one in corpus.cases() if one.name == case), key=lambda one: (one.flax, one.orbax))
    for one in having:
        slow = line.get("slow", False) or one is not having[0]
        yield {"name": f"{one.release}: {case} {part}".strip(), "base": f"{one} {part}", **line, "slow": slow}


def digest(path: Path) -> str | None:
    """Something that is equal only if all below a path is; None if nothing is there."""
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        return None
    return repr({name: digest(path / name) for name in sorted(os.listdir(path))})


class Builder:
    """Build rows in a folder of its own, each base once.

    Attributes:
        folder: where the bases stay.
        unpacked: where the archives of the corpus are unpacked.
    """

    def __init__(self, folder: Path, unpacked: Path):
        self.folder, self.unpacked = folder, unpacked
        self._built: dict[str, Path] = {}

    def put(self, row: Row, into: Path) -> Path:
        """Build a row in a directory, and return its path."""
        into.mkdir(parents=True, exist_ok=True)
        path = into / row.at
        path.parent.mkdir(parents=True, exist_ok=True)
        base = self.base(row.base)
        for part in sorted(base.iterdir()):  # "it", and what belongs beside it, such as "it_gda"
            _copy(part, path.with_name(path.name + part.name.removeprefix("it")))
        for step in row.change:
            CHANGES[step[0]](path, *step[1:])
        return path

    def put_older(self, row: Row, into: Path) -> None:
        """Put the complete step 5 beside it."""
        _copy(self.base("manager" if row["in_manager"] else "msgpack, older") / "it", into / row.older)

    def base(self, name: str) -> Path:
        """The folder of a base, whose entries begin with ``it``."""
        if name not in self._built:
            folder = self.folder / hashlib.sha256(name.encode()).hexdigest()[:12]
            folder.mkdir(parents=True)
            if ":" in name:
                self._from_corpus(name, folder / "it")
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    BASES[name](folder / "it")
            self._built[name] = folder
        return self._built[name]

    def _from_corpus(self, name: str, path: Path) -> None:
        source, part = self.case(name)[0], name.partition(" ")[2]
        _copy(source.parent if part == "step" else source, path)
        arrays = source.with_name(source.name + "_gda")
        if arrays.is_dir():
            shutil.copytree(arrays, path.with_name("it_gda"))

    def case(self, name: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """The path of a case of the corpus, what was saved there, and what is known about it."""
        return corpus.read(corpus.Case(*name.partition(" ")[0].split(":")), self.unpacked)

    def what_it_is(self, row: Row, restored: Any) -> str:
        """A word for a restored value: ``this``, ``tree`` (only that of several items), ``older``, ``nothing``."""
        if restored is None:
            return "nothing"
        if ":" in row.base:
            wrong = self._differs(row, restored)
            if not wrong or normal(restored) == normal(OLDER):
                return "older" if wrong else "this"
            return f"other values: {wrong}"
        for word, value in {**values().get(row.base, {"this": TREE}), "older": OLDER}.items():
            if normal(restored) == normal(value):
                return word
        return f"other values: {str(restored)[:150]}"

    def _differs(self, row: Row, restored: Any) -> str:
        _, entries, meta = self.case(row.base)
        case = corpus.Case(*row.base.partition(" ")[0].split(":"))
        if meta["target"] == "json":
            return "" if normal(restored) == normal(meta["json_item"]) else "not the JSON item"
        if case.name == "orbax_prng/handler" and isinstance(restored, dict):
            restored = {name: value for name, value in restored.items() if name != "npkey"}
        if isinstance(restored, dict) and restored.keys() == {"metadata", "state"}:
            restored = restored["state"]
        if isinstance(restored, dict) and restored.keys() == {"metadata", "metrics", "state"}:
            restored = restored["state"]
        got = dict(corpus.flatten(restored))
        if got.keys() != entries.keys():
            return f"leaves {sorted(got.keys() ^ entries.keys())[:5]}"
        found = (corpus.difference(case, at, entry, got[at], with_target=False) for at, entry in entries.items())
        return "; ".join(filter(None, found))


def normal(tree: Any) -> Any:
    """Something that is equal for two restored trees only if types, dtypes, shapes and bits are; lists as in Flax."""
    return canonical(serialization.to_state_dict(tree))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


# What real writers write: each at the path that it is given.


def _by(handler: Any, path: Path, args: Any) -> None:
    """What a handler writes alone."""
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=args)


def _orbax(path: Path, tree: Any = TREE, **options: Any) -> None:
    _by(pytree_handler(**options), path, ocp.args.PyTreeSave(tree))


def _on_device(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


def _manager(path: Path, step: int = 6, **items: Any) -> None:
    """One step of a CheckpointManager."""
    root = path.with_name("manager")
    with ocp.CheckpointManager(root) as manager:
        args = items.pop("default", None)
        manager.save(step, args=args if args is not None else ocp.args.Composite(**items))
        manager.wait_until_finished()
    (root / str(step)).rename(path)
    shutil.rmtree(root)


def _bare_names(path: Path) -> None:
    """Take what only newer releases write from a step."""
    for file in [*path.rglob("_CHECKPOINT_METADATA"), *path.rglob("commit_success.txt")]:
        file.unlink()


def _old_numbered_items(path: Path) -> None:
    _manager(path, net_1=ocp.args.PyTreeSave(PARAMS), net_2=ocp.args.PyTreeSave(EMA))
    _bare_names(path)


def _json_by_its_own_checkpointer(path: Path) -> None:
    """Items that were each saved by a checkpointer of its own: each has its ``_CHECKPOINT_METADATA``."""
    path.mkdir()
    _by(ocp.JsonCheckpointHandler(), path / "metadata", ocp.args.JsonSave(NOTES))
    _orbax(path / "state")


def _item_by_its_own_checkpointer(path: Path) -> None:
    """A step of a manager into which another checkpointer saved a tree, beside the item of the manager."""
    _manager(path, state=ocp.args.PyTreeSave(TREE))
    _orbax(path / "ema", EMA)


class WordsHandler(ocp.CheckpointHandler):
    """A user's own handler: one text file."""

    def save(self, directory: Any, args: Any) -> None:
        """Writes it."""
        (Path(directory) / "words.txt").write_text(args.item)

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Reads it."""
        return (Path(directory) / "words.txt").read_text()


@ocp.args.register_with_handler(WordsHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Words(ocp.args.CheckpointArgs):
    """What it saves."""

    item: str = ""


def _v1_json(path: Path) -> None:
    registry = ocp_v1.handlers.local_registry()
    registry.add(ocp_v1.handlers.JsonHandler, checkpointable_name="notes")
    with ocp_v1.Context(checkpointables_options=ocp_v1.options.CheckpointablesOptions(registry=registry)):
        ocp_v1.save_checkpointables(path, {"state": TREE, "notes": NOTES})


def _v1_partial(path: Path) -> None:
    """Parts of a save that was never finalized."""
    ocp_v1.partial.save(path, _on_device({"params": PARAMS}))
    path.with_name("it.partial_save").rename(path)


def _jax_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays with jax's own serialization."""
    manager = jax_serialization.GlobalAsyncCheckpointManager()
    values = [jax.numpy.asarray(value) for value in arrays.values()]
    manager.serialize_with_paths(values, [str(path / name) if name else str(path) for name in arrays],
                                 on_commit_callback=lambda: None)  # fmt: skip
    manager.wait_until_finished()


def _t5x(path: Path, kvstore: dict[str, str] | None = None) -> None:
    """T5X's layout: a msgpack file whose leaves are TensorStore specs, beside zarr arrays.

    As t5x/checkpoints.py of version 3 writes it: specs have relative paths, and their driver is that of where it was
    saved, which the reader changes; names are joined with dots.
    """
    import tensorstore as ts

    specs = {}
    for name, value in {"target.params.w": PARAMS["w"], "state.param_states.w.m": EMA["w"]}.items():
        metadata = {"shape": value.shape, "chunks": value.shape, "compressor": {"id": "gzip"}, "dtype": "<f4"}
        spec = {"driver": "zarr", "dtype": "float32", "metadata": metadata}
        array = ts.open({**spec, "kvstore": {"driver": "file", "path": str(path / name)}}, create=True).result()
        array.write(value).result()
        specs[name] = ts.Spec({**spec, "kvstore": {"driver": "file", "path": name}}).to_json()
        specs[name]["kvstore"] = {**specs[name]["kvstore"], **(kvstore or {})}
    tree = {
        "version": 3,
        "optimizer": {
            "target": {"params": {"w": specs["target.params.w"]}},
            "state": {"step": np.int32(6), "param_states": {"w": {"m": specs["state.param_states.w.m"]}}},
        },
    }
    (path / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))


def _array(path: Path, value: np.ndarray[Any, Any]) -> None:
    import tensorstore as ts

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}, "dtype": value.dtype.name}
    ts.open({**spec, "metadata": {"shape": value.shape}}, create=True).result().write(value).result()


def _pax(path: Path) -> None:
    """Pax's layout without OCDBT: a JSON item, arrays that are named by their key paths, and a file written last."""
    (path / "metadata").mkdir(parents=True)
    (path / "metadata" / "metadata").write_text('{"version": 1.1}')
    _array(path / "state" / "mdl_vars.params.w", PARAMS["w"])
    (path / "commit_success.txt").touch()


def _msgpack(path: Path, tree: Any = TREE) -> None:
    path.write_bytes(serialization.to_bytes(tree))


def _gda(path: Path, name: str) -> None:
    """A file that real Flax wrote in two processes, and its arrays."""
    (file,) = (one for one in (GDA / name).glob("checkpoint_*") if one.is_file())
    shutil.copy(file, path)
    shutil.copytree(file.with_name(file.name + "_gda"), path.with_name("it_gda"))


# What others write.


def _torch_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": 1}, protocol=2))
        archive.writestr("archive/version", "3\n")


def _safetensors(path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(56)
    path.write_bytes(struct.pack("<Q", len(header)) + header + np.ones(2, "<f4").tobytes())


def _sqlite(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("create table steps (n integer)")
    database.close()


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, PARAMS["w"])


def _npy_in_a_row(path: Path) -> None:
    """What ``equinox.tree_serialise_leaves`` writes, as its documentation says."""
    with path.open("wb") as file:
        np.save(file, np.ones(2))
        np.save(file, np.ones(3))


def _npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=PARAMS["w"])


def _several_objects(path: Path) -> None:
    """A stream as EasyLM writes it: a key and a value, leaf after leaf."""
    packer = msgpack.Packer()
    with path.open("wb") as stream:
        for key, value in ((("params", "w"), PARAMS["w"]), (("params", "b"), np.ones(3, np.float32))):
            stream.write(packer.pack((list(key), serialization.msgpack_serialize(value))))


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "PyTorch zip": _torch_zip,
    **{f"pickle {n}": lambda path, n=n: path.write_bytes(pickle.dumps({"w": [1.0] * 9}, n)) for n in range(2, 6)},
    "git-lfs pointer": lambda path: path.write_bytes(_POINTER),
    "safetensors": _safetensors,
    "HDF5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(504)),
    "SQLite": _sqlite,
    "gzip": lambda path: path.write_bytes(gzip.compress(serialization.to_bytes(TREE), mtime=0)),
    "zstd": lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x00\x41\x00\x00" + b"12345678" + bytes(4)),
    "npz": _npz,
    "npy": _npy,
    # As their formats describe the first bytes, with others behind them.
    "zlib": lambda path: path.write_bytes(zlib.compress(serialization.to_bytes(TREE))),
    "ONNX": lambda path: path.write_bytes(b"\x08\x07\x12\x07pytorch\x1a\x032.1:" + _NOISE),
    "TFLite": lambda path: path.write_bytes(b"\x1c\x00\x00\x00TFL3" + _NOISE),
    "MATLAB": lambda path: path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + _NOISE),
    "TFRecord": lambda path: path.write_bytes(struct.pack("<Q", 100) + _NOISE),
    "LMDB": lambda path: path.write_bytes(bytes(10) + b"\x08" + bytes(5) + b"\xde\xc0\xef\xbe\x01" + _NOISE),
    "CBOR": lambda path: path.write_bytes(b"\xa2\x61a\x01\x61b\x99\x08\x00" + _NOISE),
    "OpenPGP": lambda path: path.write_bytes(b"\x85\x01\x0c\x03" + _NOISE),
    "Equinox": lambda path: _npy_in_a_row(path),
    "text": lambda path: path.write_text("step 6: loss 0.25\n"),
    "JSON": lambda path: path.write_text(json.dumps(NOTES)),
    "HTML": lambda path: path.write_text("<!DOCTYPE html><html>404</html>"),
}


def _folder(path: Path, files: dict[str, Callable[[Path], Any]]) -> None:
    for name, write in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write(path / name)


def _words(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


def _array_stream(path: Path) -> None:
    path.write_bytes(serialization.msgpack_serialize(PARAMS))


_CONFIG = _words('{"model_type": "bert"}')
FOLDERS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "folder of PyTorch files": {"model.pt": _torch_zip, "optimizer.pt": _torch_zip},
    "folder of text": {"log.txt": _words("step 6\n"), "notes/more.txt": _words("x\n")},
    "folder of npy": {"w.npy": _npy},
    "folder of JSON": {"a.json": _words("{}"), "b.json": _words("{}")},
    "Hugging Face, PyTorch": {"config.json": _CONFIG, "pytorch_model.bin": _torch_zip},
    "Hugging Face, safetensors": {"config.json": _CONFIG, "model.safetensors": _safetensors},
    "Hugging Face, Flax": {"config.json": _CONFIG, "flax_model.msgpack": _msgpack},
    "Hugging Face, Flax shards": {
        "config.json": _CONFIG,
        "flax_model-00001-of-00002.msgpack": _array_stream,
        "flax_model-00002-of-00002.msgpack": _array_stream,
        "flax_model.msgpack.index.json": _words('{"weight_map": {}}'),
    },
    "folder of .mpk": {"model.mpk": _msgpack},
    "folder of .mpack": {"params.mpack": _msgpack, "state.mpack": _msgpack},
    "TensorFlow": {"checkpoint": _words('model_checkpoint_path: "ckpt-6"\n'), "ckpt-6.index": _words("x"),
                   "ckpt-6.data-00000-of-00001": _words("y")},
    "levanter": {"manifest.ocdbt": _words("x"), "d/0": _words("y"), "metadata.json": _words('{"step": 6}')},
    "CLU": {
        "checkpoint": _words('model_checkpoint_path: "ckpt-6"\n'),
        "ckpt-6.flax": _msgpack,
        "ckpt-6.index": lambda path: path.write_bytes(b"\x00\x00\x02\x08\x01" + bytes(40)),
        "ckpt-6.data-00000-of-00001": lambda path: path.write_bytes(bytes(16)),
    },
}  # fmt: skip


# Temporaries.


@functools.cache
def _ours(writer: str) -> str:
    """The name of a temporary of ours for step 6, by its writer."""
    if writer == "elsewhere":
        return ".checkpoint_6.9f86d081884c-4711-53210-0new.orbax-checkpoint-tmp"
    return os.path.basename(temporaries.temporary_path("checkpoint_6"))


BASES: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "empty file": lambda path: path.touch(),
    "empty folder": lambda path: path.mkdir(),
    "msgpack": _msgpack,
    "msgpack, older": lambda path: _msgpack(path, OLDER),
    "msgpack, one array": lambda path: _msgpack(path, PARAMS["w"]),
    "msgpack, by us": lambda path: flax_ckpt_compat.save(path, TREE, format="msgpack"),
    "orbax, by us": lambda path: flax_ckpt_compat.save(path, TREE, format="orbax"),
    "gda": lambda path: _gda(path, "two_processes_tree"),
    "gda, one array": lambda path: _gda(path, "two_processes_leaf"),
    "gda without file": lambda path: (_gda(path, "two_processes_tree"), path.unlink()),
    "orbax": _orbax,
    "orbax, small": lambda path: _orbax(path, SMALL),
    "orbax, jax arrays": lambda path: _orbax(path, _on_device(TREE)),
    "orbax, zarr3": lambda path: _orbax(path, use_zarr3=True),
    "orbax, loose": lambda path: _orbax(path, use_ocdbt=False),
    "orbax, loose zarr3": lambda path: _orbax(path, use_ocdbt=False, use_zarr3=True),
    "orbax, loose jax arrays": lambda path: _orbax(path, _on_device(TREE), use_ocdbt=False),
    "bare array": lambda path: _orbax(path, PARAMS["w"], use_ocdbt=False),
    "bare array, zarr3": lambda path: _orbax(path, PARAMS["w"], use_ocdbt=False, use_zarr3=True),
    "bare number": lambda path: _orbax(path, 6, use_ocdbt=False),
    "bare number, zarr3": lambda path: _orbax(path, 6, use_ocdbt=False, use_zarr3=True),
    "standard": lambda path: _by(ocp.StandardCheckpointHandler(), path, ocp.args.StandardSave(_on_device(TREE))),
    "manager": lambda path: _manager(path, 5, default=ocp.args.PyTreeSave(OLDER)),
    "manager, one item": lambda path: _manager(path, default=ocp.args.PyTreeSave(TREE)),
    "manager, items": lambda path: _manager(path, params=ocp.args.PyTreeSave(EMA), state=ocp.args.PyTreeSave(TREE)),
    "manager, JSON": lambda path: _manager(path, metadata=ocp.args.JsonSave(NOTES), state=ocp.args.PyTreeSave(TREE)),
    "manager, key": lambda path: _manager(
        path, key=ocp.args.JaxRandomKeySave(jax.random.key(KEY_SEED)), state=ocp.args.PyTreeSave(TREE)
    ),
    "manager, array": lambda path: _manager(
        path, mean=ocp.args.ArraySave(PARAMS["w"]), state=ocp.args.PyTreeSave(TREE)
    ),
    "manager, old, net_1 and net_2": _old_numbered_items,
    "manager, custom item": lambda path: _manager(path, state=ocp.args.PyTreeSave(TREE), vocabulary=Words("of mine")),
    "manager, custom item alone": lambda path: _manager(path, vocabulary=Words("of mine")),
    "custom": lambda path: _by(WordsHandler(), path, Words("of mine")),
    "manager, an item of its own": _item_by_its_own_checkpointer,
    "JSON of its own": _json_by_its_own_checkpointer,
    "JSON alone": lambda path: _by(ocp.JsonCheckpointHandler(), path, ocp.args.JsonSave(NOTES)),
    "JSON, key": lambda path: [BASES["JSON alone"](path), (path / "jax_random_key").mkdir()],
    "v1": lambda path: ocp_v1.save(path, TREE),
    "v1, items": lambda path: ocp_v1.save_checkpointables(path, {"params": EMA, "state": TREE}),
    "v1, JSON": _v1_json,
    "v1 partial": _v1_partial,
    "jax array": lambda path: _jax_arrays(path, {"": PARAMS["w"]}),
    "jax arrays": lambda path: _jax_arrays(path, {"w": PARAMS["w"], "b": np.ones(3, np.float32)}),
    "jax arrays, dots": lambda path: _jax_arrays(path, {"params.w": PARAMS["w"], "params.b": np.ones(3, np.float32)}),
    "T5X": _t5x,
    "T5X, gfile": lambda path: _t5x(path, {"driver": "gfile"}),
    "T5X, gcs": lambda path: _t5x(path, {"driver": "gcs", "bucket": "t5-data"}),
    "Pax": _pax,
    "stream": _several_objects,
    **FOREIGN,
    **{name: functools.partial(_folder, files=files) for name, files in FOLDERS.items()},
}


def gda_values(name: str) -> Any:
    """What two processes of real Flax saved into a folder of ``tests/data/gda``."""
    entries = json.loads((GDA / name / "expected.json").read_text(encoding="utf-8"))
    tree: dict[str, Any] = {}
    for path, entry in entries.items():
        if not path:
            return corpus.expected_value(entry)
        *above, last = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = corpus.expected_value(entry)
    return tree


@functools.cache
def values() -> dict[str, dict[str, Any]]:
    """Base → word → value, where TREE is not what was saved; ``tree`` is the only tree of several items."""
    bare = {"this": PARAMS["w"]}
    items = {"this": {"params": EMA, "state": TREE}, "params alone": EMA, "state alone": TREE}
    noted = {"this": {"metadata": NOTES, "state": TREE}, "tree": TREE, "JSON alone": NOTES}
    t5x = {
        "target": {"params": PARAMS},
        "state": {"step": np.int32(6), "param_states": {"w": {"m": EMA["w"]}}},
    }
    return {
        "stream": {"this": {"params": {"w": PARAMS["w"], "b": np.ones(3, np.float32)}}},
        "safetensors": {"this": {"w": np.ones(2, np.float32)}},
        "npz": {"this": {"w": PARAMS["w"]}},
        "msgpack, one array": bare,
        "orbax, small": {"this": SMALL},
        "gda": {"this": gda_values("two_processes_tree")},
        "gda, one array": {"this": gda_values("two_processes_leaf")},
        "bare array": bare,
        "bare array, zarr3": bare,
        "bare number": {"this": 6},
        "bare number, zarr3": {"this": 6},
        "manager, items": items,
        "v1, items": items,
        "manager, an item of its own": {"this": {"ema": EMA, "state": TREE}},
        "manager, JSON": noted,
        "JSON of its own": noted,
        **{kind: {"this": NOTES} for kind in ("JSON alone", "JSON, key")},
        "v1, JSON": {
            "this": {"notes": NOTES, "state": TREE},
            "tree": TREE,
            "JSON alone": NOTES,
            "JSON as an item": {"notes": NOTES},
        },
        "manager, key": {"this": {"key": jax.random.key(KEY_SEED), "state": TREE}, "tree": TREE},
        "manager, array": {"this": {"mean": PARAMS["w"], "state": TREE}, "tree": TREE},
        "manager, old, net_1 and net_2": {"this": {"net_1": PARAMS, "net_2": EMA}},
        "manager, custom item": {"tree": TREE},
        **{
            base: {"this": {"version": 3, "optimizer": t5x}, "T5X, unwrapped": t5x}
            for base in ("T5X", "T5X, gfile", "T5X, gcs")
        },
    }


# Changes, file by file; names that differ from save to save are given as patterns of glob.


def _each(path: Path, pattern: str) -> list[Path]:
    if not pattern:
        return [path]
    found = sorted(path.glob(pattern))
    assert found, f"{pattern} is not in {sorted(os.listdir(path))}"
    return found


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _lose(path: Path, *patterns: str) -> None:
    for one in itertools.chain.from_iterable(_each(path, pattern) for pattern in patterns):
        _remove(one)


def _keep_only(path: Path, *names: str) -> None:
    _lose(path, *(name for name in os.listdir(path) if name not in names))


def _copied_until(path: Path, name: str) -> None:
    """Leave what a copy in the order of names has written before it comes to this file or folder."""
    for one in sorted(path.rglob("*"), reverse=True):  # what is in a folder before the folder
        inside = str(one.relative_to(path))
        if inside >= name and not name.startswith(f"{inside}/"):
            _remove(one)


def _rewrite(change: Callable[[bytes], bytes]) -> Callable[..., None]:
    def apply(path: Path, pattern: str = "") -> None:
        for one in _each(path, pattern):
            one.write_bytes(change(one.read_bytes()))

    return apply


def _put(path: Path, name: str, content: str = "") -> None:
    if name.endswith("/"):
        (path / name).mkdir(parents=True)
    else:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)


def _wrap(path: Path, name: str) -> None:
    """Move it one folder down."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.mkdir()
    aside.rename(path / name)


def _link(path: Path) -> None:
    """Leave a symbolic link where it was to where it is now."""
    elsewhere = path.parent.with_name(f"elsewhere of {path.parent.name}")
    elsewhere.mkdir(exist_ok=True)
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


CHANGES: dict[str, Callable[..., None]] = {
    "lose": _lose,
    "lose beside": lambda path, suffix: _remove(Path(f"{path}{suffix}")),
    "copy beside": lambda path, suffix: _copy(path, path.with_name(path.name + suffix)),
    "only": _keep_only,
    "copied until": _copied_until,
    "pointer": _rewrite(lambda _: _POINTER),
    "empty": _rewrite(lambda _: b""),
    "zeros": _rewrite(lambda content: bytes(len(content))),
    "half": _rewrite(lambda content: content[: len(content) // 2]),
    "cut": _rewrite(lambda content: content[:-1]),
    "one byte more": _rewrite(lambda content: content + b"\0"),
    "flip": _rewrite(lambda content: content[:-3] + bytes([content[-3] ^ 0xFF]) + content[-2:]),
    "garble": _rewrite(lambda content: b"\xc1" * len(content)),
    "put": _put,
    "rename": lambda path, old, new: (path / old).rename(path / new),
    "wrap": _wrap,
    "set aside": set_aside,
    "link": _link,
    "link to": lambda path, to: path.symlink_to(to),
}
