"""show: every leaf with its type and size, folded trees, totals, and statistics compared with numpy's."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rich.console
from click.testing import CliRunner, Result

from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core import backend
from flax_ckpt_compat._view import show
from flax_ckpt_compat._view.array_values import Stats
from flax_ckpt_compat.cli import main
from tests.support.saves import save_items, use_flag
from tests.support.saves import saved_by_peer as saved

TREE: dict[str, Any] = {
    "opt": [{"mu": jnp.ones(3, jnp.bfloat16)}, None],
    "params": {
        f"block_{n}": {"attn": {"kernel": np.full((4, 8), n, np.float32)}, "bias": np.zeros(8 if n else 9, np.float32)}
        for n in range(12)
    },
    "step": 3,
}


def run(*arguments: object) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


@pytest.mark.parametrize("real_orbax", [False, True], ids=["flax", "orbax"])
def test_text(real_orbax: bool, tmp_path: Path) -> None:
    """Layers of equal types are one subtree, with the sums of their leaves and sizes; then come totals by dtype."""
    path = saved(tmp_path, TREE, real_orbax=real_orbax)
    result = run(tmp_path)
    assert result.exit_code == 0
    title, heading, *rows = result.stdout.splitlines()
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(TREE["params"])) + 6 + 8
    assert nbytes == 12 * 128 + 11 * 32 + 36 + 14
    assert title == f"{path} ({'orbax' if real_orbax else 'msgpack'}): 26 leaves, 1.94 kB"
    assert heading.split() == ["leaf", "type", "leaves", "size"]
    assert [re.sub(" +", " ", row) for row in rows] == [
        "opt 1 6 B",
        " 0 1 6 B",
        " mu bfloat16[3] 1 6 B",
        " 1 None 0",
        "params 24 1.92 kB",
        " block_0 2 164 B",
        " attn 1 128 B",
        " kernel float32[4,8] 1 128 B",
        " bias float32[9] 1 36 B",
        " block_{1..11} 22 1.76 kB",
        " attn 11 1.41 kB",
        " kernel float32[4,8] 11 1.41 kB",
        " bias float32[8] 11 352 B",
        "step int 1 8 B",
        "",
        "dtype leaves size",
        "float32 24 1.92 kB",
        "int 1 8 B",
        "bfloat16 1 6 B",
    ]
    assert len({row.rindex("kernel") for row in rows if "kernel" in row}) == 1  # same indentation
    assert rows[7].startswith("      kernel")


def test_depth_and_filter(tmp_path: Path) -> None:
    """--depth sums up what is below; --filter takes leaves by whole names, anywhere or from the root."""
    saved(tmp_path, TREE)
    rows = [line.split() for line in run(tmp_path, "--depth", 1).stdout.splitlines()[2:5]]
    assert rows == [["opt", "1", "6", "B"], ["params", "24", "1.92", "kB"], ["step", "int", "1", "8", "B"]]
    counts = {
        "kernel": 12,
        "kern": 0,
        "block_1": 2,
        "^params/block_[0-3]/.*": 8,
        "^kernel": 0,
        "^step": 1,
        "bias|mu": 13,
    }
    for pattern, count in counts.items():
        result = run(tmp_path, "--filter", pattern, "--json")
        assert result.exit_code == (0 if count else 2), result.stderr
        assert not count or len(json.loads(result.stdout)["leaves"]) == count
    assert "at the top it has: opt, params, step" in run(tmp_path, "--filter", "kern").stderr
    assert "13 of 26 leaves" in run(tmp_path, "--filter", "bias|mu").stdout
    bad = run(tmp_path, "--filter", "(")
    assert (bad.exit_code, "--filter: '(' is not a regular expression" in bad.stderr) == (2, True)


def test_json(tmp_path: Path) -> None:
    """JSON has each leaf, folded or not, and totals by dtype."""
    saved(tmp_path, TREE)
    found = json.loads(run(tmp_path, "--json").stdout)
    assert (found["stored"], found["nbytes"], len(found["leaves"])) == (26, 1938, 26)
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    expected = {"path": "opt/0/mu", "kind": "array", "shape": [3], "dtype": "bfloat16", "nbytes": 6, "sharding": None}
    assert leaves["opt/0/mu"] == expected
    assert found["empty"] == {"opt/1": "None"}
    assert found["dtypes"]["float32"] == {"leaves": 24, "nbytes": 1924}


def test_json_beside_the_only_tree(tmp_path: Path) -> None:
    """A step of a manager is shown, and counted, with its metrics and other JSON."""
    save_items(tmp_path, state={"x": np.ones(2)}, notes=ocp.args.JsonSave({"loss": 0.5}))
    shown = json.loads(run(tmp_path, "--json").stdout)["leaves"]
    assert {leaf["path"]: leaf["kind"] for leaf in shown} == {"x": "array", "notes/loss": "float"}
    (listed,) = json.loads(CliRunner().invoke(main, ["ls", str(tmp_path), "--leaves", "--json"]).stdout)
    assert listed["leaves"] == 2


def test_sharding(tmp_path: Path) -> None:
    """The saved sharding is shown as partition spec and mesh, unless it is of a single device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    spec = jax.sharding.PartitionSpec(("data", "model"), None)
    sharded = jax.device_put(np.ones((4, 2), np.float32), jax.sharding.NamedSharding(mesh, spec))
    saved(tmp_path, {"a": sharded, "b": jnp.ones(2)}, real_orbax=True)
    rows = run(tmp_path).stdout.splitlines()
    assert rows[1].endswith("sharding")
    assert rows[2].endswith("P(('data', 'model'), None) of data=1, model=1")
    assert rows[3].endswith(" 8 B")


DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint64, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1000, 2**20 + 17])
def test_statistics_are_those_of_numpy(dtype: Any, size: int) -> None:
    """Of finite elements: min and max exactly, mean to rounding; NaN and infinity are counted."""
    array = (np.random.default_rng(size).random(size) * 120).astype(dtype)
    floats = array.dtype.kind not in "iub"
    if floats and size > 1:
        array[5:50] = np.nan
        if dtype is not ml_dtypes.float8_e4m3fn:
            array[70:73] = [np.inf, -np.inf, np.inf]
    stats = Stats()
    for part in np.array_split(array, 3):
        stats.add(part)
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert (stats.min, stats.max) == (finite.min(), finite.max())
    assert stats.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12)
    assert (stats.nan, stats.inf) == (np.isnan(wide).sum(), np.isinf(wide).sum())


def test_statistics_of_what_has_none() -> None:
    """64-bit integers stay exact, int4 is a number; of nothing, NaNs and complex numbers there is no mean."""
    exact = Stats()
    exact.add(np.array([2**64 - 1, 2**63 + 1], np.uint64))
    assert (exact.min, exact.max) == (2**63 + 1, 2**64 - 1)
    narrow = Stats()
    narrow.add(np.array([-8, 7, 4], ml_dtypes.int4))
    assert (narrow.min, narrow.max, narrow.mean) == (-8, 7, 1.0)
    for array in (np.zeros((0, 3)), np.full(3, np.nan), np.array([1j, np.inf])):
        stats = Stats()
        stats.add(array)
        assert (stats.min, stats.max, stats.mean) == (None, None, None)
        assert stats.nan + stats.inf == np.count_nonzero(~np.isfinite(array))


@pytest.mark.parametrize("real_orbax", [False, True], ids=["flax", "orbax"])
def test_stats(real_orbax: bool, tmp_path: Path) -> None:
    """--stats reads all leaves; a folded row has those of all its leaves, and text has none."""
    tree = {"blocks": [{"w": np.arange(5.0) + n} for n in range(4)], "bad": np.array([np.nan, 1, np.inf]), "text": "x"}
    saved(tmp_path, tree, real_orbax=real_orbax)
    result = run(tmp_path, "--stats")
    rows = {row.split()[0]: row.split()[1:] for row in result.stdout.splitlines()[1:] if row}
    assert rows["leaf"][-5:] == ["min", "max", "mean", "NaN", "inf"]
    assert rows["w"][-5:] == ["0", "7", "3.5", "0", "0"]
    assert rows["bad"][-5:] == ["1", "1", "1", "1", "1"]
    found = {leaf["path"]: leaf["stats"] for leaf in json.loads(run(tmp_path, "--stats", "--json").stdout)["leaves"]}
    assert found["blocks/2/w"] == {"finite": 5, "nan": 0, "inf": 0, "min": 2.0, "max": 6.0, "total": 20.0, "mean": 4.0}
    assert found["text"] is None
    for width in (40, 60, 120):  # a narrow terminal folds cells, and cuts none
        console = rich.console.Console(file=io.StringIO(), width=width)
        console.print(show.report(show.choose_leaves(tmp_path, stats=True)), crop=False)
        assert sorted("".join(console.file.getvalue().split())) == sorted("".join(result.stdout.split()))


def test_stats_of_an_array_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are read in slices, of which none is lost."""
    monkeypatch.setattr(backend, "BATCH_BYTES", 2**20)
    monkeypatch.setattr("flax_ckpt_compat._view.array_values.BLOCK", 2**16)
    large = np.ones((8, 2**20), np.float32)
    large[3, 7] = 5
    saved(tmp_path, {"large": large})
    found = show.choose_leaves(tmp_path, stats=True)
    assert found.stats is not None
    (stats,) = found.stats.values()
    assert (stats.finite, stats.max, stats.total) == (2**23, 5, 2**23 + 4)


def test_strange_trees(tmp_path: Path) -> None:
    """Empty trees, a tree that is one leaf, long and unprintable names, deep trees, and several items."""
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    wide = {"x" * 10_000: 1, "red\x1b[31m": 2, "new\nline": 3, "mlp/~/0": {"w": 4}}
    for number, packed in enumerate(
        (msgpack.packb({}), flax.serialization.to_bytes(np.arange(5)), *map(msgpack.packb, (deep, wide)))
    ):
        (tmp_path / f"checkpoint_{number}").write_bytes(packed)
    texts = [run(tmp_path / f"checkpoint_{number}").stdout for number in range(4)]
    assert [text.splitlines()[2].split() for text in texts[:2]] == [
        ["<root>", "{}", "0"],
        ["<root>", "int64[5]", "1", "40", "B"],
    ]
    assert len(texts[2].splitlines()) == 2 + 200 + 3
    assert "red\\x1b[31m" in texts[3]
    assert "new\\nline" in texts[3] and r"mlp\/~\/0" in texts[3]
    assert json.loads(run(tmp_path / "checkpoint_3", "--json").stdout)["leaves"][-1]["path"] == r"mlp\/~\/0/w"
    assert len(texts[3]) < 5_000
    save_items(tmp_path / "manager", state={"w": np.ones(2)}, ema={"v": 1.5})
    found = show.choose_leaves(tmp_path / "manager")
    assert found.leaves.keys() == {("state", "w"), ("ema", "v")}
    tree, _ = str(show.report(found)).split("\n\n")
    assert {line.split()[0] for line in tree.splitlines()[1:]} == {"leaf", "state", "w", "ema", "v"}


def test_empty_items_of_sequences_keep_their_places(tmp_path: Path) -> None:
    """``optax.chain`` holds states without leaves between others: they are listed where they are."""
    others = [np.ones((n, n)) for n in range(3, 12)]
    saved(tmp_path, {"opt": [(), {"mu": [np.ones(2)] * 12}, None, *others]})
    tree, _ = str(show.report(show.choose_leaves(tmp_path))).split("\n\n")
    names = [line.split()[0] for line in tree.splitlines()[2:]]
    assert names == ["opt", "0", "1", "mu", "{0..11}", *map(str, range(2, 12))]


def test_damage(tmp_path: Path) -> None:
    """An array that cannot be read is an error that names it."""
    with use_flag(True):
        path = checkpoints.save_checkpoint(tmp_path, {"w": np.arange(2**18, dtype=np.float32)}, 1)
    largest = max((file for file in Path(path).rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1000])
    with pytest.raises(errors.CorruptCheckpointError, match="w"):
        show.choose_leaves(path, stats=True)


def test_the_page_has_a_treemap_above_the_tree(tmp_path: Path) -> None:
    """Each leaf with bytes is a box in its parent, which is as large as all in it; of many, numbered ones are one."""
    pytest.importorskip("plotly")
    tree = TREE | {"<script>alert(1)</script>": np.full(64, np.nan), "q\"'": 1}
    saved(tmp_path, tree)
    page = tmp_path / "page.html"
    for _ in range(2):  # a page is replaced
        result = run(tmp_path, "--stats", "--html", page)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"Wrote {page}.\n")
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text
    assert re.search("block_{1..11}.*\n.*attn", text)  # the tree, as on a terminal
    (drawn,) = json.loads(re.findall(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*{"', text, re.DOTALL)[0])
    sizes = dict(zip(drawn["ids"], drawn["values"], strict=True))
    parents = dict(zip(drawn["ids"], drawn["parents"], strict=True))
    assert all(sizes[f"params/block_{n}/attn/kernel"] == 128 for n in range(12)) and sizes["params/block_0/bias"] == 36
    for path, size in sizes.items():
        inside = [sizes[one] for one, above in parents.items() if above == path]
        assert not inside or sum(inside) == size
    saved(tmp_path / "many", {f"layer_{n}": {"w": np.zeros(2)} for n in range(501)})
    map_of_many = show.treemap(show.choose_leaves(tmp_path / "many"))
    assert "501 of float64[2]" in map_of_many and "layer_500" not in map_of_many


def test_the_treemap_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plotly nothing is written, and the message names the extra."""
    saved(tmp_path, TREE)
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(tmp_path, "--html", tmp_path / "page.html")
    assert result.exit_code == 2 and "pip install 'flax-ckpt-compat[plots]'" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_page_replaces_nothing_else(tmp_path: Path) -> None:
    """--html never writes over a checkpoint, or any file that is not a page."""
    path = Path(saved(tmp_path, TREE))
    before = path.read_bytes()
    for target in (path, tmp_path, tmp_path / "no" / "page.html"):
        result = run(path, "--html", target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "choose another FILE" in result.stderr
    assert path.read_bytes() == before
