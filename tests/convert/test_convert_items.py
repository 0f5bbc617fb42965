"""convert() of several items: each is read by the real handler that wrote it, bit for bit."""

import dataclasses
import functools
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from click.testing import CliRunner
from etils import epath
from flax import serialization
from google.protobuf.timestamp_pb2 import Timestamp

import flax_ckpt_compat
from flax_ckpt_compat import errors, rules
from flax_ckpt_compat.cli import main
from tests.support import path_kinds
from tests.support.peers import needs
from tests.support.peers import ocp_released_v1 as v1
from tests.support.samples import Fields, Pair, canonical
from tests.support.saves import save_items

pytestmark = needs("orbax-checkpoint", 0, 11, 25, why="has other files in array items, which older tests cover")

STATE = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "opt": [np.full(1, 3), {"mu": np.ones(2, np.float32)}],
}
EMA = {"params": {"w": STATE["params"]["w"] * 2}, "mu": [np.ones(2, np.float32)]}
NOTES = {"epoch": 3, "names": ["a", "b"], "none": None}
MEAN = np.linspace(0, 1, 5, dtype=np.float32)
RANDOM = np.random.RandomState(4).get_state(legacy=True)
GENERATOR = np.random.RandomState(5).get_state(legacy=False)


class WordsHandler(ocp.CheckpointHandler):
    """A user's own handler: a file in a folder, an empty file, and an empty folder."""

    def save(self, directory: Any, args: Any) -> None:
        (Path(directory) / "inside").mkdir()
        (Path(directory) / "inside" / "words.txt").write_text(args.value)
        (Path(directory) / "empty").touch()
        (Path(directory) / "none" / "yet").mkdir(parents=True)

    def restore(self, directory: Any, args: Any = None) -> Any:
        assert not list((Path(directory) / "none" / "yet").iterdir())
        return (Path(directory) / "inside" / "words.txt").read_text()


class JsonAndWordsHandler(WordsHandler):
    """Has a name that begins like one of Orbax, and a file that is called like one of Orbax's."""

    def save(self, directory: Any, args: Any) -> None:
        super().save(directory, args)
        (Path(directory) / "_METADATA").write_text("not JSON")


class PyTreeWithAssetsHandler(ocp.CheckpointHandler):
    """A user's own handler that lets Orbax's write a tree, and puts a file beside it."""

    def __init__(self) -> None:
        self._trees = ocp.PyTreeCheckpointHandler(use_ocdbt=False)

    def save(self, directory: Any, args: Any) -> None:
        self._trees.save(directory, args=ocp.args.PyTreeSave(args.value))
        (directory / "assets").mkdir()
        (directory / "assets" / "words.txt").write_text("of a model")

    def restore(self, directory: Any, args: Any = None) -> Any:
        return self._trees.restore(directory, args=ocp.args.PyTreeRestore()), (
            directory / "assets/words.txt"
        ).read_text()


def argument_of(handler: Any) -> Any:
    """The class of the argument of a user's own handler."""
    made = dataclasses.make_dataclass(
        f"{handler.__name__}Args", [("value", Any, None)], bases=(ocp.args.CheckpointArgs,)
    )
    return ocp.args.register_with_handler(handler, for_save=True, for_restore=True)(made)


Words, JsonAndWords, TreeWithAssets = map(argument_of, (WordsHandler, JsonAndWordsHandler, PyTreeWithAssetsHandler))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of item: what saves it, what restores it, and what that must give."""

    saved: Any
    restore: Callable[[], Any]
    value: Any


KINDS = {
    "state": Kind(ocp.args.StandardSave(STATE), ocp.args.StandardRestore, STATE),
    "ema": Kind(ocp.args.PyTreeSave(jax.tree.map(jnp.asarray, EMA)), ocp.args.PyTreeRestore, EMA),
    "mean": Kind(ocp.args.ArraySave(jnp.asarray(MEAN)), ocp.args.ArrayRestore, MEAN),
    "host": Kind(ocp.args.ArraySave(MEAN * 2), ocp.args.ArrayRestore, MEAN * 2),
    "key": Kind(ocp.args.JaxRandomKeySave(jax.random.key(7)), ocp.args.JaxRandomKeyRestore, jax.random.key(7)),
    "old_key": Kind(
        ocp.args.JaxRandomKeySave(jax.random.PRNGKey(8)), ocp.args.JaxRandomKeyRestore, jax.random.PRNGKey(8)
    ),
    "numpy": Kind(ocp.args.NumpyRandomKeySave(RANDOM), ocp.args.NumpyRandomKeyRestore, RANDOM),
    "generator": Kind(ocp.args.NumpyRandomKeySave(GENERATOR), ocp.args.NumpyRandomKeyRestore, GENERATOR),
    "notes": Kind(ocp.args.JsonSave(NOTES), ocp.args.JsonRestore, NOTES),
    "words": Kind(ocp.args.JsonSave(NOTES), ocp.args.JsonRestore, NOTES),  # under a file's name of its own
    "vocabulary": Kind(Words("of mine"), Words, "of mine"),
    "tokens": Kind(JsonAndWords("alike"), JsonAndWords, "alike"),
    "network": Kind(TreeWithAssets({"w": MEAN}), TreeWithAssets, ({"w": MEAN}, "of a model")),
    "settings": Kind(
        ocp.args.ProtoSave(Timestamp(seconds=5)), lambda: ocp.args.ProtoRestore(Timestamp), Timestamp(seconds=5)
    ),
}


def registry() -> Any:
    """Orbax's handlers, with a JSON item under a file's name of its own."""
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for argument in (ocp.args.JsonSave, ocp.args.JsonRestore):
        found.add("words", argument, ocp.JsonCheckpointHandler(filename="words.json"))
    return found


def saved(root: Path, names: Any = KINDS, step: int = 5) -> Path:
    """A step of a real manager with items of these kinds."""
    with ocp.CheckpointManager(root, handler_registry=registry()) as manager:
        manager.save(step, args=ocp.args.Composite(**{name: KINDS[name].saved for name in names}))
    return root / str(step)


def restored(step: Path, name: str, kind: Kind) -> Any:
    """What the real handler restores of an item of a step."""
    if step.name.isdecimal():
        with ocp.CheckpointManager(step.parent, handler_registry=registry()) as manager:
            if name == "default":
                return manager.restore(int(step.name), args=kind.restore())
            return manager.restore(int(step.name), args=ocp.args.Composite(**{name: kind.restore()}))[name]
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(handler_registry=registry())) as checkpointer:
        return checkpointer.restore(step, args=ocp.args.Composite(**{name: kind.restore()}))[name]


STEP = {"manager": {"step": 5}, "v1": {"step": 5}}  # layouts whose names are steps


def converted(source: Path, destination: Path, to: Any, **options: Any) -> Path:
    """The one result of a conversion, as step 5 where there are steps."""
    (done,) = flax_ckpt_compat.convert(source, destination, to, **STEP.get(to, {}), **options)
    return Path(done.destination)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with an item of every kind."""
    return saved(tmp_path_factory.mktemp("every") / "run")


@pytest.fixture(scope="module", params=["manager", "v1", "orbax"])
def result(step: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it becomes in each layout with items."""
    return converted(step, tmp_path_factory.mktemp(request.param) / "items", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_item_is_read_by_the_handler_that_wrote_it(result: Path, name: str) -> None:
    """Whatever the layout, with the defaults of the real handler, bit for bit."""
    assert canonical(restored(result, name, KINDS[name])) == canonical(KINDS[name].value)


def test_handlers_stay_recorded(step: Path, result: Path) -> None:
    """The handlers of all that is copied are those of the source, by which a restore without arguments finds them."""
    before, after = (json.loads((one / "_CHECKPOINT_METADATA").read_text())["item_handlers"] for one in (step, result))
    trees = {"state", "ema"}
    assert after.keys() == before.keys() == KINDS.keys()
    assert {name: after[name] for name in KINDS.keys() - trees} == {name: before[name] for name in KINDS.keys() - trees}


def test_what_only_its_own_handler_reads_is_copied_byte_for_byte_and_noted(step: Path, tmp_path: Path) -> None:
    """Assets in a folder without a handler, too; a second conversion finds every changed byte."""
    source = tmp_path / "run" / "5"
    shutil.copytree(step, source)
    (source / "assets" / "deep").mkdir(parents=True)
    (source / "assets" / "deep" / "logo.png").write_bytes(bytes(range(256)))
    convert = functools.partial(flax_ckpt_compat.convert, tmp_path / "run", tmp_path / "dst", "manager")
    (done,) = convert()
    assert (tmp_path / "dst" / "5" / "assets" / "deep" / "logo.png").read_bytes() == bytes(range(256))
    assert [note for note in done.notes if "assets" in note and "vocabulary" in note]
    assert [result.status for result in convert(resume=True)] == ["kept"]
    for other in (b"\1" + bytes(range(1, 256)), b""):
        (tmp_path / "dst" / "5" / "assets" / "deep" / "logo.png").write_bytes(other)
        with pytest.raises(errors.ConversionError, match=r"assets/deep/logo\.png has other bytes"):
            convert(resume=True)
    (tmp_path / "dst" / "5" / "assets" / "deep" / "logo.png").unlink()
    (tmp_path / "dst" / "5" / "mean" / "more").write_bytes(b"x")  # which its handler may read
    with pytest.raises(errors.ConversionError, match="mean/more is not in the source"):
        convert(resume=True)
    with pytest.raises(errors.ConversionError, match=r"assets/deep/logo\.png is missing"):
        convert(resume=True)


@pytest.mark.parametrize("names", [("state",), ("state", "notes")])
@pytest.mark.parametrize("to", ["manager", "v1", "orbax", "msgpack"])
def test_files_beside_the_items_are_copied_and_noted(tmp_path: Path, to: Any, names: tuple[str, ...]) -> None:
    """A configuration in the step's folder is no item, and is not lost; a file's result names it as left out."""
    source = saved(tmp_path / "run", names)
    (source / "config.yaml").write_text("lr: 0.1")
    is_items = to != "msgpack" and len(names) > 1
    for name in names if is_items else ():  # beside the files of an item; the JSON is found all the same
        (source / name / "readme.txt").write_text(name)
        assert flax_ckpt_compat.restore(source, item="notes") == NOTES
        renamed = converted(source, tmp_path / name, to, item={"state": "model", "notes": "notes"})
        assert (renamed / {"state": "model"}.get(name, name) / "readme.txt").read_text() == name
        assert canonical(restored(renamed, "notes", KINDS["notes"])) == canonical(NOTES)
    item = "state" if to == "msgpack" and len(names) > 1 else None
    (done,) = flax_ckpt_compat.convert(source, tmp_path / "dst", to, item=item, **STEP.get(to, {}))
    noted = [note for note in (done.left_out if to == "msgpack" else done.notes) if "config.yaml" in note]
    assert len(noted) == (item is None)
    if to == "msgpack":
        return
    copied = Path(done.destination) / "config.yaml"
    assert copied.read_text() == "lr: 0.1"
    assert canonical(flax_ckpt_compat.restore(done.destination)["params"]) == canonical(STATE["params"])
    copied.write_text("lr: 0.2")
    with pytest.raises(errors.ConversionError, match=r"config\.yaml has other bytes"):
        converted(source, tmp_path / "dst", to, resume=True)


def below(folder: Path) -> list[str]:
    """The relative paths of the files and folders below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("to", ["manager", "v1", "orbax"])
@pytest.mark.parametrize(
    "base",
    [
        *({}, "T5X"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"use_ocdbt": False}, {"use_zarr3": True})),
        *(pytest.param(f"T5X, {driver}", marks=pytest.mark.slow) for driver in ("gfile", "gcs")),
    ],
    ids=str,
)
def test_what_lies_beside_a_tree_is_copied(tmp_path: Path, to: Any, base: Any) -> None:
    """Folders stay beside the tree's files: as the item of a step, real managers would ask for their handler."""
    source = tmp_path / "run" / "5"
    if isinstance(base, dict):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**base)) as checkpointer:
            checkpointer.save(source, args=ocp.args.PyTreeSave({**EMA, "text": "text"}))
    else:
        source.mkdir(parents=True)
        path_kinds.BASES[base](source)
    stored = canonical(flax_ckpt_compat.restore(source))
    (done,) = flax_ckpt_compat.convert(source, tmp_path / "plain", to, step=5)
    assert not [note for note in done.notes if "other files" in note]
    (source / "assets" / "deep").mkdir(parents=True)
    (source / "assets" / "deep" / "words.txt").write_text("word")
    (source / "config.yaml").write_text("lr: 0.1")
    (done,) = flax_ckpt_compat.convert(source, tmp_path / "dst", to, step=5)
    assert [note for note in done.notes if note.startswith("copied") and "assets" in note and "config.yaml" in note]
    own = {"manager": "default", "v1": "state", "orbax": ""}[to]
    copied = Path(done.destination) / own / "assets" / "deep" / "words.txt"
    assert (copied.read_text(), (Path(done.destination) / "config.yaml").read_text()) == ("word", "lr: 0.1")
    if to == "manager" and isinstance(base, dict):
        with ocp.CheckpointManager(tmp_path / "dst") as manager:
            assert canonical(manager.restore(5)) == stored
    if to == "v1" and isinstance(base, dict):
        with v1.training.Checkpointer(tmp_path / "dst") as steps:
            assert canonical(steps.load(5)) == stored
    copied.unlink()
    with pytest.raises(errors.ConversionError, match=r"words\.txt"):
        flax_ckpt_compat.convert(source, tmp_path / "dst", to, step=5, resume=True)
    (done,) = flax_ckpt_compat.convert(source, tmp_path / "file", "msgpack")
    assert done.left_out == ("other files in its directory: assets, config.yaml",)


def all_of_one_file(root: Path) -> Path:
    """A real manager's step of a tree, an array and a key, with custom metadata and files beside each."""
    with ocp.CheckpointManager(root) as manager:
        saving = ocp.args.PyTreeSave(EMA, custom_metadata={"lr": 0.1})
        items = ocp.args.Composite(ema=saving, mean=KINDS["mean"].saved, key=KINDS["key"].saved)
        manager.save(5, args=items, custom_metadata={"by": "me"})
    for folder in (".", "ema", "mean", "key"):
        (root / "5" / folder / f"{folder.strip('.')}.txt").write_text("of mine")
    return root / "5"


@pytest.mark.parametrize("to", ["msgpack", "safetensors"])
def test_a_result_that_lacks_what_a_file_has_no_place_for_ends_with_exit_code_1(tmp_path: Path, to: str) -> None:
    """It is written, whole but for what is named, and a second run keeps it; --to orbax ends with 0."""
    source = all_of_one_file(tmp_path / "run")
    items = ["--item", "ema", "--item", "mean", "--item", "key"]
    if to == "safetensors":  # which has no keys
        shutil.rmtree(source / "key")
        record = json.loads((source / "_CHECKPOINT_METADATA").read_text())
        del record["item_handlers"]["key"]
        (source / "_CHECKPOINT_METADATA").write_text(json.dumps(record))
        items = items[:4]
    command = ["convert", str(source), str(tmp_path / "file"), "--to", to]
    planned = CliRunner().invoke(main, [*command, "--dry-run"])
    assert planned.exit_code == 1 and "would be written without: other files" in planned.output
    assert not (tmp_path / "file").exists()
    result = CliRunner().invoke(main, command)
    lacking = [".txt", "ema/ema.txt", *(["key/key.txt"] if to == "msgpack" else []), "mean/mean.txt"]
    expected = f"written without: other files in its directory: {', '.join(lacking)}; custom metadata; custom metadata"
    assert result.exit_code == 1 and expected in result.output and "--to orbax keeps them" in result.output
    if to == "msgpack":
        assert canonical(serialization.msgpack_restore((tmp_path / "file").read_bytes())["ema"]["params"]) == canonical(
            EMA["params"]
        )
    else:
        assert canonical(safetensors.numpy.load_file(tmp_path / "file")["mean"]) == canonical(MEAN)
    written = (tmp_path / "file").stat()
    kept = CliRunner().invoke(main, [*command, "--resume", "--json"])
    assert kept.exit_code == 1 and '"status": "kept"' in kept.output and '"left_out": [' in kept.output
    after = (tmp_path / "file").stat()
    assert (after.st_mtime_ns, after.st_ino) == (written.st_mtime_ns, written.st_ino)
    named = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "named"), "--to", to, *items])
    assert named.exit_code == 0 and "Note:" in named.output and "custom metadata of trees" in named.output
    assert (tmp_path / "named").read_bytes() == (tmp_path / "file").read_bytes()
    whole = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "whole"), "--to", "orbax"])
    assert whole.exit_code == 0, whole.output
    found = ocp.PyTreeCheckpointHandler().metadata(tmp_path / "whole" / "ema").custom_metadata
    assert (found["lr"], (tmp_path / "whole" / "mean" / "mean.txt").read_text()) == (0.1, "of mine")


def test_transforms_that_lose_the_metadata_of_a_tree_say_so(tmp_path: Path) -> None:
    """Trees that a target arranges anew have no metadata of their own, also as directories of Orbax."""
    saving = ocp.args.PyTreeSave(EMA, custom_metadata={"lr": 0.1})
    save_items(tmp_path / "run", 5, ema=saving, state=KINDS["state"].saved)
    (done,) = flax_ckpt_compat.convert(
        tmp_path / "run" / "5",
        tmp_path / "dst",
        "orbax",
        target={"w": jax.ShapeDtypeStruct((2, 3), np.float32)},
        transforms=[rules.move("ema/params/w", "w")],
    )
    assert done.left_out == ("custom metadata of trees",)


def test_a_tree_with_files_of_a_users_own_handler_is_no_file(tmp_path: Path) -> None:
    """Its other files have no place in one, so it is refused; a tree alone, of whatever handler, is converted."""
    source = saved(tmp_path / "run", ("network",))
    with pytest.raises(errors.ConversionError, match=r"no place for network \(of an unknown kind\)"):
        converted(source, tmp_path / "file", "msgpack")
    shutil.rmtree(source / "network" / "assets")
    found = serialization.msgpack_restore(converted(source, tmp_path / "file", "msgpack").read_bytes())
    assert canonical(found) == canonical({"w": MEAN})


@pytest.mark.parametrize("to", ["manager", "v1", "orbax"])
def test_metadata_of_trees_travels(tmp_path: Path, to: Any) -> None:
    """What PyTreeSave took as custom_metadata is in the tree's metadata; a result without it is found."""
    saving = ocp.args.PyTreeSave(EMA, custom_metadata={"lr": 0.1, "names": ["a"]})
    save_items(tmp_path / "run", 5, ema=saving, mean=KINDS["mean"].saved)
    result = converted(tmp_path / "run" / "5", tmp_path / "dst", to)
    found = ocp.PyTreeCheckpointHandler().metadata(result / "ema").custom_metadata
    assert {key: found[key] for key in ("lr", "names")} == {"lr": 0.1, "names": ["a"]}
    assert canonical(restored(result, "ema", KINDS["ema"])) == canonical(EMA)
    file = result / "ema" / "_METADATA"
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(errors.ConversionError, match="custom metadata is other JSON"):
        converted(tmp_path / "run" / "5", tmp_path / "dst", to, resume=True)


@pytest.mark.parametrize("to", ["manager", "v1", "orbax"])
def test_rich_types_travel(tmp_path: Path, to: Any) -> None:
    """Real Orbax restores the tuples and named tuples that it recorded, and so does structure="stored"."""
    options = importlib.import_module("orbax.checkpoint._src.metadata.pytree_metadata_options")
    handler = ocp.PyTreeCheckpointHandler(
        pytree_metadata_options=options.PyTreeMetadataOptions(support_rich_types=True)
    )
    adam = jax.tree.map(np.asarray, optax.adam(1).init(MEAN))
    tree = {"pair": Pair(MEAN, (1, [Pair(2, None)])), "empty": (), "list": [3], "adam": adam}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "run" / "5", args=ocp.args.PyTreeSave(tree))
        before = checkpointer.restore(tmp_path / "run" / "5", args=ocp.args.PyTreeRestore())
    result = converted(tmp_path / "run", tmp_path / "dst", to)
    result /= {"manager": "default", "v1": "state", "orbax": ""}[to]
    after = handler.restore(epath.Path(result), args=ocp.args.PyTreeRestore())
    leaves = (jax.tree_util.tree_leaves_with_path(one) for one in (before, after))
    paths = [[(str(path), canonical(leaf)) for path, leaf in one] for one in leaves]
    assert paths[0] == paths[1] and any("GetAttrKey" in path for path, _ in paths[1])
    found = flax_ckpt_compat.restore(result, structure="stored")
    fields = found["pair"]._fields, type(found["pair"].right), found["adam"][0]._fields
    assert fields == (("left", "right"), tuple, ("count", "mu", "nu"))
    as_stored = {"target": dict.fromkeys(tree), "transforms": {"list": "list"}}
    flax_ckpt_compat.convert(tmp_path / "run", tmp_path / "all", "orbax", **as_stored)
    one, other = (flax_ckpt_compat.restore(path, structure="flax") for path in (tmp_path / "all", result))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("to", ["msgpack", "safetensors"])
@pytest.mark.parametrize("name", ["notes", "vocabulary"])
def test_what_a_file_has_no_place_for_is_an_error_that_says_what_to_do(tmp_path: Path, to: Any, name: str) -> None:
    """JSON and unknown items are not dropped with exit code 0; the advice works."""
    saved(tmp_path / "run", ("state", name))
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "run"), str(tmp_path / "dst"), "--to", to])
    assert result.exit_code == 1
    assert name in result.output and "--item state" in result.output and "'manager'" in result.output
    assert "or all to 'orbax'" in " ".join(result.output.split())
    assert not list((tmp_path / "dst").glob("*"))
    arguments = ["convert", str(tmp_path / "run" / "5"), str(tmp_path / "file"), "--to", to, "--item", "state"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = (
        serialization.msgpack_restore((tmp_path / "file").read_bytes())["params"]["w"]
        if to == "msgpack"
        else safetensors.numpy.load_file(tmp_path / "file")["params.w"]
    )
    assert canonical(found) == canonical(STATE["params"]["w"])


@pytest.mark.parametrize(
    ("target", "names"), [(Pair, ("left", "right")), (Fields, ("first", "second")), (dict, ("params", "opt"))]
)
def test_a_target_names_the_items_also_by_its_fields(tmp_path: Path, target: Any, names: tuple[str, str]) -> None:
    """Each tree gets the containers of its part."""
    trees = dict(zip(names, ({"w": np.ones(2)}, {"mu": {"0": np.zeros(2)}}), strict=True))
    save_items(tmp_path / "run", 5, **trees)
    wanted = target(**dict(zip(names, ({"w": 0}, {"mu": [0]}), strict=True)))
    result = converted(tmp_path / "run" / "5", tmp_path / "dst", "manager", target=wanted)
    assert canonical(flax_ckpt_compat.restore(result)) == canonical({**trees, names[1]: {"mu": [np.zeros(2)]}})


def test_a_file_has_trees_arrays_and_keys_by_their_names(tmp_path: Path) -> None:
    """As a restore without a target gives them."""
    file = converted(saved(tmp_path / "run", ("state", "mean", "old_key", "numpy")), tmp_path / "file", "msgpack")
    found = serialization.msgpack_restore(file.read_bytes())
    assert canonical((found["mean"], found["old_key"])) == canonical((MEAN, jax.random.PRNGKey(8)))
    assert canonical(found["numpy"]["1"]) == canonical(RANDOM[1])


def test_json_of_v1_is_read_by_both_releases_of_orbax(tmp_path: Path) -> None:
    """v1 writes data.json, where v0 looks for another name."""
    handlers = v1.handlers.local_registry()
    handlers.add(v1.handlers.JsonHandler, checkpointable_name="notes")
    options = v1.options.CheckpointablesOptions(registry=handlers)
    with v1.Context(checkpointables_options=options):
        v1.save_checkpointables(tmp_path / "5", {"state": STATE, "notes": NOTES})
    for to in ("manager", "v1"):
        result = converted(tmp_path / "5", tmp_path / to, to)
        with v1.Context(checkpointables_options=options):
            assert v1.load_checkpointables(result)["notes"] == NOTES
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restore = ocp.args.Composite(notes=ocp.args.JsonRestore())
        assert checkpointer.restore(tmp_path / "manager" / "5", args=restore)["notes"] == NOTES


@pytest.mark.parametrize("name", ["mean", "key", "numpy"])
def test_damage_of_a_copied_item_is_found(tmp_path: Path, name: str) -> None:
    """Copies of damaged bytes are not results."""
    item = saved(tmp_path / "run", ("state", name)) / name
    data = [file for file in item.rglob("*") if file.name == "0" or file.parent.name == "d"]
    for file in data:
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(errors.ConversionError, match="CorruptCheckpointError"):
        flax_ckpt_compat.convert(tmp_path / "run", tmp_path / "dst", "manager")
    assert not list((tmp_path / "dst").glob("*"))


def test_metrics_and_metadata_travel_between_the_managers_of_both_releases(tmp_path: Path) -> None:
    """The only tree gets the name that each manager restores by default, and the best step is known."""
    state = {"a": jnp.ones(2), "b": {"c": jnp.arange(3)}}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: -metrics["loss"])
    with v1.training.Checkpointer(tmp_path / "v1") as checkpointer:
        checkpointer.save(7, state, metrics={"loss": 0.25}, custom_metadata={"by": "me"})
    flax_ckpt_compat.convert(tmp_path / "v1", tmp_path / "v0", "manager")
    with ocp.CheckpointManager(tmp_path / "v0", options=options) as manager:
        assert (manager.best_step(), manager.metrics(7)) == (7, {"loss": 0.25})
        assert manager.metadata(7).custom_metadata == {"by": "me"}
        assert canonical(manager.restore(7)) == canonical(state)
        saving = ocp.args.StandardSave(state)
        manager.save(8, args=saving, metrics={"loss": 0.5}, custom_metadata={"by": "you"})
    for to in ("v1", "manager"):
        flax_ckpt_compat.convert(tmp_path / "v0", tmp_path / to[0], to)  # type: ignore[arg-type]
    with v1.training.Checkpointer(tmp_path / "v") as checkpointer:
        assert canonical(checkpointer.load(8)) == canonical(state)
        assert [found.metrics for found in checkpointer.checkpoints] == [{"loss": 0.25}, {"loss": 0.5}]
    with ocp.CheckpointManager(tmp_path / "m", options=options) as manager:
        assert (manager.best_step(), manager.metrics(8)) == (7, {"loss": 0.5})
        assert manager.metadata(8).custom_metadata == {"by": "you"}
    with pytest.raises(errors.ConversionError, match=r"no place for metrics \(JSON\)"):
        flax_ckpt_compat.convert(tmp_path / "v0", tmp_path / "files", "msgpack")
    for done in flax_ckpt_compat.convert(tmp_path / "v0", tmp_path / "files", "msgpack", item="default"):
        assert done.notes == ("not converted: custom metadata",)


OF_OWN_HANDLERS = ("vocabulary", "tokens", "settings")


HANDLERS: dict[str, Callable[[], Any]] = {
    "vocabulary": WordsHandler,
    "tokens": JsonAndWordsHandler,
    "settings": lambda: ocp.ProtoCheckpointHandler(filename="proto.pbtxt"),
    "network": PyTreeWithAssetsHandler,
    "notes": ocp.JsonCheckpointHandler,
    "mean": ocp.ArrayCheckpointHandler,
    **dict.fromkeys(("key", "old_key"), ocp.JaxRandomKeyCheckpointHandler),
    **dict.fromkeys(("numpy", "generator"), ocp.NumpyRandomKeyCheckpointHandler),
}


@pytest.mark.parametrize("to", ["manager", "v1", "orbax"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in ("network", *OF_OWN_HANDLERS) else pytest.mark.slow) for one in HANDLERS],
)
def test_one_item_alone(tmp_path: Path, to: Any, name: str) -> None:
    """Without a step around it, it stays one that its handler reads; custom metadata stays, too."""
    with ocp.Checkpointer(HANDLERS[name]()) as checkpointer:
        checkpointer.save(tmp_path / "alone", args=KINDS[name].saved, custom_metadata={"by": "me"})
    result = converted(tmp_path / "alone", tmp_path / "dst", to)
    own = {"manager": "default", "v1": "state", "orbax": None}[to]
    if own is None:
        with ocp.Checkpointer(HANDLERS[name]()) as checkpointer:
            found = checkpointer.restore(result, args=KINDS[name].restore())
    else:
        found = restored(result, own, KINDS[name])
    assert canonical(found) == canonical(KINDS[name].value)
    if name in OF_OWN_HANDLERS or name == "network":
        assert own or below(result) == below(tmp_path / "alone")
    else:  # lists, where Orbax has a tuple
        found = flax_ckpt_compat.restore(result, item=own)
        assert canonical(jax.tree.leaves(found)) == canonical(jax.tree.leaves(KINDS[name].value))
    assert json.loads((result / "_CHECKPOINT_METADATA").read_text())["custom_metadata"] == {"by": "me"}
    (kept,) = flax_ckpt_compat.convert(tmp_path / "alone", tmp_path / "dst", to, resume=True, **STEP.get(to, {}))
    assert kept.status == "kept"


@pytest.mark.parametrize("to", ["manager", "orbax"])
def test_items_of_releases_that_recorded_no_handlers_are_copied(tmp_path: Path, to: Any) -> None:
    """Orbax before 0.11.6 recorded none: folders stay the items of a step, and files those of a checkpoint."""
    source = saved(tmp_path / "run", ("settings",))
    with ocp.Checkpointer(WordsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "alone", args=Words("of mine"))
    for folder in (source, tmp_path / "alone"):
        record = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
        del record["item_handlers"]
        (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(record))
    result = converted(source, tmp_path / "items", to)
    assert restored(result, "settings", KINDS["settings"]) == Timestamp(seconds=5)
    result = converted(tmp_path / "alone", tmp_path / "whole", to)
    assert (result / ("" if to == "orbax" else "default") / "inside" / "words.txt").read_text() == "of mine"


@pytest.mark.parametrize("name", OF_OWN_HANDLERS)
def test_one_item_that_only_its_own_handler_reads(tmp_path: Path, name: str) -> None:
    """Chosen alone, and with a tree, it is copied."""
    source = saved(tmp_path / "run", ("state", name))
    result = converted(source, tmp_path / "alone", "manager", item=name)
    assert canonical(restored(result, name, KINDS[name])) == canonical(KINDS[name].value)
    assert not (result / "state").exists()
    result = converted(source, tmp_path / "dst", "manager", item=[name, "state"])
    assert canonical(restored(result, name, KINDS[name])) == canonical(KINDS[name].value)
    for other in ("..", "a/b", "a\0b"):
        with pytest.raises(errors.ConversionError, match="cannot be the name of an item"):
            converted(source, tmp_path / "other", "manager", item={name: other})


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}], ids=["database", "folders"])
def test_a_damaged_tree_of_a_users_own_handler_stays_damaged(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are arrays, a structure that does not decode is one that was lost."""
    monkeypatch.setattr(
        PyTreeWithAssetsHandler,
        "__init__",
        lambda self: setattr(self, "_trees", ocp.PyTreeCheckpointHandler(**options)),
    )
    source = saved(tmp_path / "run", ("network",))
    (source / "network" / "_METADATA").write_text("not JSON")
    for path in (source, tmp_path / "run"):
        assert flax_ckpt_compat.verify(path).state == "damaged"
    lost = errors.CorruptCheckpointError, errors.IncompleteCheckpointError  # of the second, a database was never merged
    with pytest.raises(lost, match=r"_METADATA|manifest\.ocdbt"):
        flax_ckpt_compat.restore(source)


def test_transforms_do_not_touch_what_is_copied(tmp_path: Path) -> None:
    """A rule for the tree leaves arrays alone; one that would change an array, or finds no tree, says so."""
    source = saved(tmp_path / "run", ("state", "mean", "notes", "vocabulary"))
    result = converted(source, tmp_path / "dst", "manager", transforms=[rules.rename("params", "weights")])
    assert canonical(restored(result, "mean", KINDS["mean"])) == canonical(MEAN)
    assert restored(result, "notes", KINDS["notes"]) == NOTES
    assert restored(result, "vocabulary", KINDS["vocabulary"]) == "of mine"
    assert canonical(restored(result, "state", KINDS["state"])["weights"]) == canonical(STATE["params"])
    with pytest.raises(errors.ConversionError, match=r"mean.*is no tree"):
        converted(source, tmp_path / "other", "manager", transforms=[rules.cast("mean", "float16")])
    source = saved(tmp_path / "none", ("settings",))
    with pytest.raises(errors.ConversionError, match="nothing to transform; convert it without"):
        converted(source, tmp_path / "other", "orbax", transforms=[rules.rename("a", "b")])


_ignores = pytest.mark.filterwarnings("ignore:Sharding info not provided", "ignore:Couldn't find sharding info")


@_ignores
def test_a_tree_of_gpus_without_a_target(tmp_path: Path) -> None:
    """The only tree, keys too, as managers of both releases restore it with no argument but the step.

    Its shardings name a GPU that is not here."""
    tree, of_gpus = jax.tree.map(jnp.asarray, {**EMA, "key": jax.random.key(3)}), tmp_path / "gpus" / "5"
    save_items(tmp_path / "gpus", 5, ema=ocp.args.StandardSave(tree), mean=KINDS["mean"].saved)
    for file in of_gpus.rglob("_sharding"):
        text = file.read_text()
        assert "cpu:0" in text
        file.write_text(text.replace("cpu:0", "cuda:0"))
    with pytest.raises(ValueError, match="should be specified, concrete"):
        restored(of_gpus, "mean", KINDS["mean"])
    with ocp.CheckpointManager(converted(of_gpus, tmp_path / "a", "manager", item={"ema": "default"}).parent) as one:
        assert canonical(one.restore(5)) == canonical(tree)
    with v1.training.Checkpointer(converted(of_gpus, tmp_path / "b", "v1", item={"ema": "state"}).parent) as two:
        assert canonical(two.load(5)) == canonical(tree)
    flat = converted(of_gpus, tmp_path / "c", "orbax", item="ema")
    for restore in (ocp.StandardCheckpointer().restore, ocp.PyTreeCheckpointer().restore, v1.load):
        assert canonical(restore(flat)) == canonical(tree)


@_ignores
def test_shardings_are_kept_if_asked_for(tmp_path: Path) -> None:
    """Arrays come back as jax arrays on the device that they were on."""
    step = saved(tmp_path / "run", ("ema", "mean"))
    result = converted(step, tmp_path / "dst", "manager", sharding="keep")
    for name in ("ema", "mean"):
        found = restored(result, name, KINDS[name])
        assert canonical(found) == canonical(KINDS[name].value)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    with pytest.raises(errors.SettingError, match="'drop' or 'keep'"):
        flax_ckpt_compat.convert(step, tmp_path / "other", "orbax", sharding="no")  # type: ignore[arg-type]
