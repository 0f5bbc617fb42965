"""plan_restore: what it says, before it is done, and that just this is what is done."""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import rich.console
from click.testing import CliRunner

from flax_ckpt_compat import checkpoints, config, open_checkpoint, plan_restore, restore, rules, save
from flax_ckpt_compat.cli import main
from flax_ckpt_compat.errors import MissingLeavesError, TransformError
from flax_ckpt_compat.transforms import RestoreTransform, Transform
from tests.support.samples import fingerprint
from tests.support.stored import flat

STORED = {
    "params": {"dense": {"kernel": np.arange(6.0).reshape(2, 3), "bias": np.ones(3, np.float32)}, "scale": np.ones(2)},
    "step": 7,
    "extra": {"note": "x"},
}
TARGET = {
    "params": {"encoder": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3, np.float16)}, "scale": np.zeros(4)},
    "step": 0,
    "stats": {"mean": np.full(2, 9.0)},
}
RULES = [rules.rename("dense", "encoder"), rules.from_target("stats")]


@pytest.fixture
def saved(flag: bool, tmp_path: Path) -> str:
    """A checkpoint of STORED, in each format."""
    return checkpoints.save_checkpoint(tmp_path, STORED, 3)


def by_path(plan: Any) -> dict[str, Any]:
    """The planned leaves by their paths."""
    return {leaf.path: leaf for leaf in plan.leaves}


def test_every_target_leaf_is_told(saved: str, flag: bool, tmp_path: Path) -> None:
    """For every leaf of the target: where it comes from, its shape and dtype, and the bytes that it needs."""
    plan = plan_restore(tmp_path, TARGET, transforms=RULES)
    leaves = by_path(plan)
    assert list(leaves) == [*flat(TARGET)]
    kernel = leaves["params/encoder/kernel"]
    assert (kernel.origin, kernel.sources, kernel.nbytes) == ("checkpoint", ("params/dense/kernel",), 48)
    assert (kernel.shape, kernel.dtype) == ((2, 3), np.float64)
    bias = leaves["params/encoder/bias"]
    assert bias.is_retyped and (bias.dtype, bias.target_dtype) == (np.float32, np.float16)
    assert leaves["params/scale"].is_reshaped and leaves["params/scale"].target_shape == (4,)
    assert leaves["step"].shape is None
    mean = leaves["stats/mean"]
    assert (mean.origin, mean.how, mean.sources, mean.nbytes) == ("target", "from_target", (), 0)
    assert plan.missing == () and plan.unused == ("extra/note",) and plan.nbytes == 48 + 12 + 16 + 8
    assert "Stored, but not used: extra/note" in str(plan)
    assert plan.path == saved and plan.format == ("orbax" if flag else "msgpack")
    below = by_path(plan_restore(tmp_path, {"params": {"dense": None}}))  # None takes whatever is stored there
    assert sorted(below) == ["params/dense/bias", "params/dense/kernel"] and below["params/dense/bias"].shape == (3,)


def test_a_stored_container_without_leaves(tmp_path: Path) -> None:
    """It takes the place of an array if told to, and has a row."""
    checkpoints.save_checkpoint(tmp_path, {"m": {}, "a": np.ones(2)}, 1)
    target = {"m": np.ones(3), "a": np.ones(2)}
    leaves = by_path(plan_restore(tmp_path, target, kind_mismatch="ignore"))
    assert {path: (leaf.origin, leaf.shape) for path, leaf in leaves.items()} == {
        "m": ("checkpoint", None), "a": ("checkpoint", (2,))
    }  # fmt: skip


def test_what_is_missing(saved: str, tmp_path: Path) -> None:
    """Missing leaves are those for which the restore raises; the policy keep and {} make them the target's."""
    plan = plan_restore(tmp_path, TARGET)
    for nothing in (None, [], ()):  # a list that came out empty asks for nothing, unlike {}
        with pytest.raises(MissingLeavesError) as caught:
            checkpoints.restore_checkpoint(tmp_path, TARGET, orbax_transforms=nothing)
    assert plan.missing == caught.value.missing
    assert set(plan.missing) == {"params/encoder/kernel", "params/encoder/bias", "stats/mean"}
    assert plan_restore(tmp_path, TARGET, transforms={}).missing == plan.missing  # restore is strict, whatever is given
    given = plan_restore(tmp_path, TARGET, missing_leaves="ignore")
    with config.override(missing_leaves="ignore"):
        kept = plan_restore(tmp_path, TARGET)
    assert given.missing == kept.missing == () and given.leaves == kept.leaves
    assert by_path(kept)["stats/mean"].origin == "target"


def test_an_empty_state_that_is_missing_is_told(flag: bool, tmp_path: Path) -> None:
    """An optimizer state without values, which the restore would miss, is in the plan too."""
    checkpoints.save_checkpoint(tmp_path, {"opt": {"0": {}}}, 1)
    target = {"opt": (optax.EmptyState(), optax.EmptyState())}
    assert plan_restore(tmp_path, target).missing == ("opt/1",)
    with pytest.raises(MissingLeavesError):
        checkpoints.restore_checkpoint(tmp_path, target)


def test_transforms_in_a_plan(saved: str, tmp_path: Path) -> None:
    """Functions of the caller are named, with the stored leaves that they take; the shape is theirs to tell."""
    target = {"a": np.zeros(3), "b": np.zeros(3), "c": np.zeros(1), "step": 0}
    several = RestoreTransform(
        multi_value_fn=lambda key, tree, args: tree["params"]["scale"],
        multi_value_fn_input_args={"params/scale": None, "params/dense/b.*": None},
    )
    transforms = {
        "a": Transform(original_key="params/dense/bias"),
        "b": Transform(original_key="params/dense/bias", value_fn=lambda value: value * 2),
        "c": several,
        "step": Transform(use_fallback=True),
    }
    leaves = by_path(plan_restore(tmp_path, target, transforms=transforms))
    assert (leaves["a"].origin, leaves["a"].sources) == ("checkpoint", ("params/dense/bias",))
    assert (leaves["b"].origin, leaves["b"].how, leaves["b"].shape) == ("computed", "value_fn", None)
    assert set(leaves["c"].sources) == {"params/scale", "params/dense/bias"}
    assert leaves["step"].origin == "target"
    restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=transforms)
    expected = {"a": np.ones(3, np.float32), "b": np.full(3, 2, np.float32), "c": np.ones(2), "step": 0}
    assert fingerprint(restored) == fingerprint(expected)


def test_a_slash_within_a_name_is_shown_as_such(flag: bool, tmp_path: Path) -> None:
    """In plan, page, error and listing; the shown path is a pattern for rules, and a path for reading."""
    checkpoints.save_checkpoint(tmp_path, {"a/b": np.ones(2), "c": {"d/e": {"w": np.ones(3)}}}, 1)
    plan = plan_restore(tmp_path, {"a": {"b": np.zeros(2)}, "c": {"d/e": {"w": np.zeros(3)}}})
    assert plan.unused == (r"a\/b",) and plan.missing == ("a/b",)
    assert plan.leaves[1].path == r"c/d\/e/w"
    with pytest.raises(MissingLeavesError, match=re.escape(r"a/b   (stored: a\/b)")):
        restore(tmp_path, {"a": {"b": np.zeros(2)}})
    target = {"c": {"d/e": {"w": np.zeros(3)}}, "x": {"w": np.zeros(3)}}
    for steps in ([rules.copy(r"c/d\/e", "x")], [{"x": r"c/d\/e", "c": "c"}]):
        assert restore(tmp_path, target, transforms=steps)["x"]["w"].all()
    with open_checkpoint(tmp_path) as opened:
        assert opened.read(r"c/d\/e/w")["c"]["d/e"]["w"].all()


def test_many_plain_leaves_are_counted_and_odd_ones_listed(flag: bool, tmp_path: Path) -> None:
    """Of leaves under their own names some are listed; a missing one among a hundred is still seen."""
    tree = {f"layer_{chr(65 + n % 26)}{chr(65 + n // 26)}": np.ones(2) for n in range(100)}
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    plan = plan_restore(tmp_path, {**tree, "new": np.ones(1)})
    text = str(plan)
    assert "MISSING" in text and "77 more" in text and len(text.splitlines()) < 40
    odd = plan_restore(tmp_path, {name + "z": one for name, one in tree.items()})
    assert "76 more" in str(odd) and len(str(odd).splitlines()) < 40


def test_numbered_layers_are_one_row(flag: bool, tmp_path: Path) -> None:
    """Layers that get the same are folded, with their sources; what differs among them has a row of its own."""
    blocks = {f"block_{n}": {"w": np.ones((2, 3)), "b": np.ones(3)} for n in range(24)}
    checkpoints.save_checkpoint(tmp_path, {"net": blocks}, 1)
    target = {"net": {name.replace("block", "layer"): dict(one) for name, one in blocks.items()}}
    target["net"]["layer_7"]["w"] = np.ones((2, 4))
    plan = plan_restore(tmp_path, target, transforms=[rules.rename(r"block_(\d+)", r"layer_\1")])
    lines = str(plan).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("  leaf ")) + 1
    rows = [line.split(maxsplit=2) for line in lines[start : start + 3]]
    assert rows[0][:2] == ["net/layer_{0..6,8..23}/w", "net/block_{0..6,8..23}/w"]
    assert rows[0][2].endswith("(23 leaves)")
    assert rows[1][:2] == ["net/layer_{0..23}/b", "net/block_{0..23}/b"]
    assert rows[2][:2] == ["net/layer_7/w", "net/block_7/w"] and "target (2, 4)" in rows[2][2]
    console = rich.console.Console(file=io.StringIO(), width=150)
    console.print(plan)
    assert "net/block_{0..23}/b" in console.file.getvalue()


def test_notebooks_and_pages_show_what_is_printed(flag: bool, tmp_path: Path) -> None:
    """The same words, with names from outside escaped: no tags, control characters or marks of direction."""
    path = checkpoints.save_checkpoint(tmp_path, {"a": {"<b>": np.ones(2)}, "extra": {"\x1b[31m\u202e": 1}}, 1)
    plan = plan_restore(tmp_path, {"a": {"<b>": np.ones(2), "New": np.ones(1)}})
    bundle = plan._repr_mimebundle_()
    page = bundle["text/html"]
    assert bundle["text/plain"] == str(plan)
    assert "<b>" not in page and "a/&lt;b&gt;" in page and "\\x1b[31m" in page and "MissingLeavesError" in page
    assert "\x1b" not in page and "\u202e" not in page
    result = CliRunner().invoke(main, ["plan", path, "--html", str(tmp_path / "plan.html")])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "a/&lt;b&gt;" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_misspelt_transforms_are_told(saved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A transform that matches no leaf of the target is warned about; rules that are no list of calls are refused."""
    transforms = {"params/scle": Transform(original_key="params/scale"), "stats/.*": Transform(use_fallback=True)}
    checkpoints.restore_checkpoint(tmp_path, TARGET, orbax_transforms=transforms)
    assert [record for record in caplog.records if "params/scle" in record.getMessage()]
    assert not [record for record in caplog.records if "stats/.*" in record.getMessage()]
    for wrong in ([rules.rename], {"a": rules.drop("extra")}, iter([rules.drop("extra")])):
        with pytest.raises(TransformError, match="list of calls"):
            checkpoints.restore_checkpoint(tmp_path, TARGET, orbax_transforms=wrong)
    several = RestoreTransform(multi_value_fn=lambda *_: 0, multi_value_fn_input_args={"params/scal": None})
    with pytest.raises(TransformError, match="params/scale"):
        checkpoints.restore_checkpoint(tmp_path, TARGET, orbax_transforms={"step": several})


def test_a_plan_travels(saved: str, tmp_path: Path) -> None:
    """A pickled plan has the same leaves and verdict, without the trees behind it, and so without a proposal."""
    plan = plan_restore(tmp_path, TARGET)
    assert plan.suggestion is not None
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and again.missing == plan.missing and again.suggestion is None
    lines = str(again).splitlines()
    assert [line for line in str(plan).splitlines() if line in lines] == lines and "transforms" not in str(again)


def test_a_sharding_that_does_not_fit_is_told(tmp_path: Path) -> None:
    """Where shapes differ, too, as in a target of replicas."""
    path = save(tmp_path / "saved", {"b": np.ones(3, np.float32)}, format="orbax")
    rows = jax.sharding.PartitionSpec("rows", None)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)), rows)
    plan = plan_restore(path, {"b": jax.ShapeDtypeStruct((1, 4), np.float32, sharding=sharding)})
    assert (plan.raises, plan.flax_succeeds) == ("ShapeMismatchError", False)
    assert "does not fit the target's NamedSharding" in str(plan)
