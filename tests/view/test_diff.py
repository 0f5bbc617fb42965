"""diff: what is paired across formats, what counts as a difference, and the numbers, compared with numpy's."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner

from flax_ckpt_compat import Diff, LeafDifference, checkpoints, diff, errors
from flax_ckpt_compat._view.array_values import Values
from flax_ckpt_compat.cli import main
from tests.support.saves import save_items, use_flag
from tests.support.saves import saved_by_peer as saved

TREE: dict[str, Any] = {
    "params": [{"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"w": jnp.ones(3, jnp.bfloat16)}],
    "step": 3,
    "name": "run",
    "none": None,
}


def between(tmp_path: Path, a: Any, b: Any, **options: Any) -> Diff:
    """The differences between two trees, in msgpack."""
    return diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b), **options)


def one(found: Diff) -> LeafDifference:
    """The only difference."""
    (difference,) = found.differences
    return difference


def test_the_same_in_two_formats(tmp_path: Path) -> None:
    """What real Flax and real Orbax write of one tree is the same, leaf by leaf; lists are paired by index."""
    found = diff(saved(tmp_path / "a", TREE), saved(tmp_path / "b", TREE, real_orbax=True))
    assert (found.differences, found.same, found.identical, found.formats) == ((), True, 4, ("msgpack", "orbax"))
    assert "4 leaves identical." in str(found)


def test_structure(tmp_path: Path) -> None:
    """Leaves of one side only, other shapes, other dtypes, other kinds, None and empty nodes, each once."""
    a = {"gone": np.ones(3), "shape": np.ones(3), "dtype": np.ones(3, np.float32), "kind": 1, "none": None, "x": {}}
    b = {"new": 7, "shape": np.ones((3, 1)), "dtype": np.ones(3), "kind": "1", "none": {}, "x": {"y": 1}}
    found = between(tmp_path, a, b)
    assert {(one.path, one.kind, one.a, one.b) for one in found.differences} == {
        ("gone", "only in a", "float64[3]", ""),
        ("shape", "shape", "float64[3]", "float64[3,1]"),
        ("dtype", "type", "float32[3]", "float64[3]"),
        ("kind", "type", "int 1", "str '1'"),
        ("none", "type", "None", "{}"),
        ("x", "only in a", "{}", ""),
        ("new", "only in b", "", "int"),
        ("x/y", "only in b", "", "int"),
    }
    assert found.identical == 0


def test_values(tmp_path: Path) -> None:
    """Numbers of differing elements, and the largest differences, are those of numpy."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((50, 30)).astype(np.float32)
    b = a.copy()
    b[::7] += rng.standard_normal(b[::7].shape).astype(np.float32)
    found = one(between(tmp_path, {"w": a}, {"w": b}))
    distance = np.abs(a.astype(np.float64) - b)
    assert found.values is not None
    assert found.values.other_values == found.values.other_bits == np.count_nonzero(a != b)
    assert (found.values.size, found.values.only_one_nan) == (1500, 0)
    assert found.values.max_abs == distance.max()
    assert found.values.max_rel == (distance / np.abs(b.astype(np.float64))).max()


@pytest.mark.parametrize("rtol, atol", [(None, None), (0.0, 0.0), (0.0, 0.6), (1e-3, None), (0.5, 1e-3)])
def test_tolerances(rtol: float | None, atol: float | None, tmp_path: Path) -> None:
    """A leaf within the tolerances is no difference; numpy's isclose says which are."""
    rng = np.random.default_rng(2)
    base = rng.standard_normal(200)
    leaves = {f"x{n}": base * (1 + 10.0**-n) for n in range(1, 6)} | {"same": base}
    found = between(tmp_path, leaves, dict.fromkeys(leaves, base), rtol=rtol, atol=atol)
    given = {"rtol": rtol or 0.0, "atol": atol or 0.0}
    expected = {name for name, leaf in leaves.items() if not np.isclose(leaf, base, **given).all()}
    assert {one.path for one in found.differences} == expected
    assert (found.identical, found.tolerated) == (1, 5 - len(expected))


# What is compared → a, b, the tolerances, and the numbers that `Values` has then.
COMPARED: dict[str, tuple[Any, Any, dict[str, float], dict[str, Any]]] = {
    "atol is included, as with numpy's isclose": ([1.5], [1.0], {"atol": 0.5}, {"other_values": 1, "outside": 0}),
    "rtol is included": ([3.0], [2.0], {"rtol": 0.5}, {"other_values": 1, "outside": 0}),
    "text of other lengths": (["ab", "c"], ["ab", "dddd"], {}, {"size": 2, "other_values": 1, "outside": 1}),
    "the upper bits of an int4's byte mean nothing": (
        np.frombuffer(b"\x0f\xff\x01", ml_dtypes.int4), np.array([-1, -1, 2], ml_dtypes.int4), {},
        {"other_bits": 1, "other_values": 1, "max_abs": 1.0},
    ),
    "an int4 is compared with an int8 by value": (
        np.array([1, -2, 3], ml_dtypes.int4), np.array([1, -2, 3], np.int8), {},
        {"size": 3, "other_bits": 0, "other_values": 0, "max_abs": None},
    ),
    "2**60 and 2**60 + 1 are one float": (
        [2**60 + 1, -(2**63)], [2**60, -(2**63)], {}, {"other_values": 1, "max_abs": 1.0},
    ),
    "the largest distance of int64": ([2**63 - 1], [-(2**63)], {}, {"max_abs": float(2**64 - 1)}),
    "floats of a byte are compared in a wide dtype": (
        np.array([1, 2, 3, 7]).astype(ml_dtypes.float8_e5m2), np.array([1, 4, 3, 0]).astype(ml_dtypes.float8_e5m2), {},
        {"other_values": 2, "max_abs": 7.0, "max_rel": np.inf},
    ),
    "2**63 and 2**63 - 1 are one float, of two dtypes": (
        np.array([2**63], np.uint64), [2**63 - 1], {"atol": 0.5}, {"other_values": 1, "outside": 1, "max_abs": 1.0},
    ),
    "of integers of other dtypes, also of one below zero": (
        np.array([2**64 - 1], np.uint64), np.array([-1], np.int32), {}, {"max_abs": float(2**64)},
    ),
    "an infinity is equal to itself, and infinitely far from all else": (
        [np.inf, np.inf, 1.0, -np.inf], [np.inf, -np.inf, np.inf, -np.inf], {"rtol": 1.0, "atol": 1.0},
        {"other_values": 2, "outside": 2, "max_abs": np.inf},
    ),
    "a time is no number, although numpy says that 3 s equal 3": (
        np.array([3, 4], "m8[s]"), [3, 5], {}, {"size": 2, "other_bits": 2, "other_values": 2, "outside": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_numbers_of_two_arrays(name: str) -> None:
    """What is counted, and the largest difference."""
    a, b, tolerances, expected = COMPARED[name]
    values = Values(**tolerances)
    values.add(np.asarray(a), np.asarray(b))
    assert {field: getattr(values, field) for field in expected} == expected


def test_zeros_and_nan(tmp_path: Path) -> None:
    """-0.0 and NaNs with other bits differ in bits alone; NaN in one side only is always a difference."""
    other_nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    a = {"zero": np.zeros(1, np.float32), "nan": np.full(1, np.nan, np.float32), "one": np.ones(2), "equal": np.nan}
    b = {"zero": -a["zero"], "nan": other_nan, "one": np.array([np.nan, 1.0]), "equal": np.nan}
    found = between(tmp_path, a, b)
    assert {one.path for one in found.differences} == {"zero", "nan", "one"}
    assert "the same values, of other bits" in str(found) and "1 NaN in one only" in str(found)
    assert one(diff(found.a, found.b, atol=0)).path == one(diff(found.a, found.b, atol=1e9)).path == "one"


@pytest.mark.parametrize("given", [{"rtol": "x"}, {"atol": -1}, {"atol": float("nan")}, {"rtol": [1]}])
def test_tolerances_are_numbers_from_0(given: dict[str, Any], tmp_path: Path) -> None:
    """Anything else would call all leaves different, or equal."""
    with pytest.raises(errors.SettingError, match=f"{next(iter(given))} takes a non-negative number"):
        between(tmp_path, {"n": 1}, {"n": 1}, **given)


def test_other_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    """Of leaves of another dtype, the values are compared as well."""
    a = np.array([1.0, 1.001, 2.0], np.float32)
    found = one(between(tmp_path, {"w": a}, {"w": jnp.asarray(a, jnp.bfloat16)}))
    assert (found.kind, found.a, found.b) == ("type", "float32[3]", "bfloat16[3]")
    assert found.values is not None
    assert (found.values.other_values, found.values.max_abs) == (1, float(a[1]) - 1.0)


def test_keys_and_text(tmp_path: Path) -> None:
    """PRNG keys are compared by implementation and data, texts and bytes as they are."""
    with use_flag(True):
        paths = [
            checkpoints.save_checkpoint(tmp_path / str(seed), {"key": jax.random.key(seed), "s": f"run {seed}"}, 1)
            for seed in (0, 1)
        ]
    found = diff(*paths)
    assert [(one.path, one.kind) for one in found.differences] == [("key", "values"), ("s", "values")]
    assert found.differences[1].a == "str 'run 0'"
    assert diff(paths[0], paths[0]).same
    for seeds in paths, paths[::-1]:  # no key is near another one
        assert [one.path for one in diff(*seeds, atol=2, rtol=0.5).differences] == ["key", "s"]
    data = jnp.arange(4, dtype=jnp.uint32)
    keys = [{"key": jax.random.wrap_key_data(data, impl=impl)} for impl in ("rbg", "unsafe_rbg")]
    paths = [checkpoints.save_checkpoint(tmp_path / str(at), key, 2) for at, key in enumerate(keys)]
    assert [(one.path, one.kind) for one in diff(*paths).differences] == [("key", "values")]


def test_arrays_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are compared in slices, those of another format too; all differences are found."""
    monkeypatch.setattr("flax_ckpt_compat._view.diff._PART", 2**20)
    tree = {"large": np.ones((8, 2**20), np.float32)}
    with use_flag(True):
        a = checkpoints.save_checkpoint(tmp_path / "a", tree, 1)
    tree["large"][:, 5] = 3
    found = one(diff(a, saved(tmp_path / "b", tree)))
    assert found.values is not None
    assert (found.values.size, found.values.other_values, found.values.max_rel) == (2**23, 8, 2 / 3)


def test_latest_of_directories_and_steps(tmp_path: Path) -> None:
    """Directories stand for their latest checkpoint, or for a step; what is not there is an error."""
    with use_flag(False):
        for step in (1, 2):
            checkpoints.save_checkpoint(tmp_path, {"x": step}, step, keep=9)
            checkpoints.save_checkpoint(tmp_path / "other", {"x": step}, step + 4, keep=9)
    assert diff(tmp_path, tmp_path / "checkpoint_2").same
    assert not diff(tmp_path, tmp_path / "checkpoint_1").same
    assert diff(tmp_path, tmp_path, step=1).a == str(tmp_path / "checkpoint_1")
    with pytest.raises(errors.CheckpointNotFoundError, match="nothing to compare"):
        diff(tmp_path, tmp_path / "nowhere")
    (tmp_path / "checkpoint_2").write_bytes(b"\x81\xa1x")
    hint = r"a checkpoint\. The newest other one that looks complete is checkpoint_1: pass step 1\.$"
    with pytest.raises(errors.CorruptCheckpointError, match=hint):
        diff(tmp_path, tmp_path / "other")
    beside = (tmp_path / "checkpoint_2").rename(tmp_path / "checkpoint_1 of another")
    with pytest.raises(errors.CorruptCheckpointError, match=r"a checkpoint$"):
        diff(tmp_path, beside)


@pytest.mark.parametrize("name", ["notes", "x"])
def test_json_beside_the_only_tree(tmp_path: Path, name: str) -> None:
    """Steps of a manager differ if their JSON does, also where it has the name of a leaf."""
    for run, loss in (("a", 0.5), ("b", 0.25), ("c", 0.5)):
        save_items(tmp_path / run, state={"x": np.ones(2)}, **{name: ocp.args.JsonSave({"loss": loss})})
    assert diff(tmp_path / "a", tmp_path / "c").same
    found = one(diff(tmp_path / "a", tmp_path / "b"))
    shown = "x (JSON)/loss" if name == "x" else "notes/loss"
    assert (found.path, found.a, found.b) == (shown, "float 0.5", "float 0.25")
    flat = saved(tmp_path / "flat", {"x": np.ones(2)})
    assert (one(diff(tmp_path / "a", flat)).path, one(diff(flat, tmp_path / "a")).kind) == (shown, "only in b")


def test_command(tmp_path: Path) -> None:
    """The command folds numbered layers, with the largest difference of any; exit codes 0, 1 and 2."""
    tree = {f"block_{n}": {"w": np.ones(4)} for n in range(24)} | {"step": 1}
    other = {f"block_{n}": {"w": np.ones(4) + n} for n in range(24)} | {"step": 2}
    a, b = saved(tmp_path / "a", tree), saved(tmp_path / "b", other)
    assert CliRunner().invoke(main, ["diff", a, a]).exit_code == 0
    result = CliRunner().invoke(main, ["diff", a, b])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[2:] == [
        "~ block_{1..23}/w   float64[4]: 92 of 92 elements, max abs 23, max rel 0.958   (23 leaves)",
        "~ step   int 1 → int 2",
        "1 leaf identical, 24 of other values.",
    ]
    found = json.loads(CliRunner().invoke(main, ["diff", a, b, "--json"]).stdout)
    assert (found["same"], found["identical"], len(found["differences"])) == (False, 1, 24)
    refused = CliRunner().invoke(main, ["diff", a, f"{b}x"])
    assert (refused.exit_code, refused.stdout, "does not exist" in refused.stderr) == (2, "", True)


def shown(*differences: LeafDifference) -> list[str]:
    """The lines of a diff between its two titles and its summary."""
    return str(Diff("a", "b", ("msgpack", "msgpack"), 0, 0, differences)).splitlines()[2:-1]


def test_sixty_lines_and_the_number_of_leaves_that_are_left() -> None:
    """A folded line counts as many leaves as it stands for."""
    found = [LeafDifference(f"{a}{b}", "type", "int 1", "int 2") for a in "abcdefgh" for b in "ijklmnop"]
    numbered = [LeafDifference(f"z/{n}/w", "type", "int 1", "int 2") for n in range(3)]
    assert len(shown(*found[:60])) == 60
    assert shown(*found[:60], *numbered)[60:] == ["… and 3 more leaves: see .differences, or --json"]


def test_infinite_numbers_are_text_in_json(tmp_path: Path) -> None:
    """JSON has none."""
    a, b = saved(tmp_path / "a", {"x": np.array([np.inf, 1.0])}), saved(tmp_path / "b", {"x": np.ones(2)})
    found = CliRunner().invoke(main, ["diff", a, b, "--json"]).stdout
    assert "Infinity" not in found and json.loads(found)["differences"][0]["values"]["max_abs"] == "inf"
