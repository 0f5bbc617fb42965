"""The page of recipes: each program runs, and each row of its table maps a small tree, on both formats."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_ckpt_compat import plan_restore, restore, rules, save
from tests.support.interpreters import run_python
from tests.support.peers import version

PAGE = (Path(__file__).parents[2] / "migration_guide" / "recipes.md").read_text(encoding="utf-8")
TABLE, RECIPES = PAGE.split("\n## Eight recipes\n")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST, *SECTIONS = re.split(r"^## ", RECIPES, flags=re.MULTILINE)
SURE = """
plan = plan_restore(path, target)
if plan.suggestion is not None and plan.suggestion.confident:
    assert_same(restore(path, target, transforms=plan.suggestion.rules), restored)
"""


def blocks(text: str, language: str) -> list[str]:
    """The code blocks in one language."""
    return [block for found, block in FENCE.findall(text) if found == language]


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=[section.splitlines()[0] for section in SECTIONS])
def test_recipe(section: str, flag: bool, tmp_path: Path) -> None:
    """A recipe runs, and prints what the page shows; a suggestion that is sure is right, bit by bit."""
    if "nnx.Optimizer" in section and version("flax") < (0, 11):
        pytest.skip("this Flax has another nnx.Optimizer")
    flip = f"import flax; flax.config.update('flax_use_orbax_checkpointing', {flag})"
    program = "\n".join([flip, *blocks(FIRST + section, "python"), SURE])
    printed = iter(run_python(program, cwd=tmp_path)[0].replace(str(tmp_path.resolve()), "/…").splitlines())
    for line in "".join([] if flag else blocks(section, "text")).splitlines():
        start, cut, _ = line.partition("…" if line.endswith(" …") else "\n")
        assert any(there.startswith(start) if cut else there == line for there in printed), line


def array(*shape: int) -> Any:
    """Different numbers."""
    return np.arange(1.0, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def numbered(name: str, count: int, leaf: Any) -> dict[str, Any]:
    """Equal layers with different values."""
    return {f"{name}{i}": jax.tree.map(lambda value, i=i: value + i, leaf) for i in range(count)}


def dense() -> dict[str, Any]:
    """A layer."""
    return {"kernel": array(2, 3), "bias": array(3)}


def adam(tree: Any) -> dict[str, Any]:
    """Adam's state, as Flax's state dict has it."""
    return {"count": np.int32(7), "mu": jax.tree.map(lambda leaf: leaf / 2, tree), "nu": tree}


def zeros(tree: Any) -> Any:
    """What the target has of its own."""
    return jax.tree.map(lambda leaf: leaf * 0, tree)


D, Q = dense(), {"kernel": array(4, 12)}
PARTS = {name: {"kernel": Q["kernel"][:, 4 * i : 4 * i + 4]} for i, name in enumerate(("query", "key", "value"))}
HEADS = {name: {"kernel": part["kernel"].reshape(4, 2, 2)} for name, part in PARTS.items()}
GROUPED = {name: {"kernel": Q["kernel"].reshape(4, 2, 3, 2)[:, :, i]} for i, name in enumerate(HEADS)}
ROWS = {"kernel": np.stack([D["kernel"], D["kernel"] + 1, D["kernel"] + 2])}
KERNELS = numbered("block_", 3, {"kernel": D["kernel"]})
KEY = jax.random.key(7, impl="threefry2x32")
STREAM = {"count": np.uint32(5), "key": {"value": np.asarray(jax.random.key_data(KEY))}}
EMBED = array(1, 5, 2)
LARGER = np.asarray(jax.image.resize(EMBED[:, 1:].reshape(1, 2, 2, 2), (1, 3, 3, 2), "linear")).reshape(1, 9, 2)
NORM = {"scale": array(3)}
LORA = {"kernel": D["kernel"], "lora_a": zeros(array(2, 1)), "lora_b": zeros(array(1, 3))}
OLD = {"kernel": {"grad_ema": array(2, 3), "grad_sq_ema": array(2, 3) ** 2}}
VALUES = {"kernel": {"value": D["kernel"]}}
OTHER = {"params": {"head": dense(), "l": {"lora_a": array(2, 1), "lora_b": array(1, 3)}}}


def p(tree: Any, **more: Any) -> dict[str, Any]:
    """A state with parameters."""
    return {"params": tree, **more}


# For each row of the table, in its order: what is stored, and what its rules make of it.
CASES: list[tuple[Any, Any]] = [
    (p({"Dense_0": D}), p({"encoder": {"hidden": D}})),
    (p({"a": D}), p({"model": {"a": D}})),
    (p({"model": {"a": D}}), p({"a": D})),
    ({"block1": D, "block2": D}, {"block_0": D, "block_1": D}),
    (p(KERNELS), p({"blocks": ROWS})),
    (p({"blocks": list(KERNELS.values())}), p({"blocks": ROWS})),
    (p({"blocks": ROWS}), p(KERNELS)),
    (
        p({f"encoderblock_{i}": {"LayerNorm_0": D, "MlpBlock_3_Dense_0": D} for i in range(2)}),
        p({"blocks": {name: jax.tree.map(lambda leaf: np.stack([leaf, leaf]), D) for name in ("norm_1", "up")}}),
    ),
    (p({"blocks": ROWS}), p({"blocks": {"kernel": ROWS["kernel"][:2]}})),
    (p({"blocks": ROWS}), p({"blocks": {"kernel": np.concatenate([ROWS["kernel"], np.zeros((3, 2, 3), "f4")])}})),
    (p(numbered("block_", 4, D)), p({**numbered("block_", 4, D), "block_4": zeros(D), "block_5": zeros(D)})),
    (p({"qkv": Q}), p(HEADS)),
    (p(HEADS), p({"qkv": Q})),
    (p({"qkv": Q}), p(GROUPED)),
    (
        p({"a": D}, opt_state={"0": adam({"a": D})}),
        p(
            {"a": D, "BatchNorm_0": zeros(NORM)},
            batch_stats={"mean": zeros(array(3))},
            opt_state={"0": {**adam({"a": D}), "mu": {**adam({"a": D})["mu"], "BatchNorm_0": zeros(NORM)}}},
        ),
    ),
    (
        p({"body": D, "head": {"bias": array(4)}}, opt_state={"0": adam({"body": D})}),
        p({"body": D, "head": {"bias": zeros(array(2))}}, opt_state={"0": {"trace": {"body": zeros(D)}}}),
    ),
    (
        p({"embed": {"embedding": array(3, 1)}}),
        p({"embed": {"embedding": np.concatenate([array(3, 1), np.zeros((50301, 1), "f4")])}}),
    ),
    (p({"l": {"kernel": D["kernel"]}}), p({"l": LORA})),
    (p({"l": {"kernel": D["kernel"]}}), p({"l": {"kernel": D["kernel"], **OTHER["params"]["l"]}})),
    ({"pos_embedding": EMBED}, {"pos_embedding": np.concatenate([EMBED[:, :1], LARGER], axis=1)}),
    (p({"body": zeros(D)}), p({"body": zeros(D), "head": D})),
    (p(D, opt_state={"0": {"trace": D}}), p(D, opt_state=zeros({"0": adam(D)}))),
    (p(D, opt_state={"0": adam(D)}), p(D, opt_state={"1": {"0": adam(D)}})),
    (
        p(D, opt_state={"0": adam(D)}),
        p(D, opt_state={"1": {"0": adam(D), "1": {"count": np.int32(7)}}}),
    ),
    ({"opt_states": [adam(D), adam(NORM)]}, {"generator": {"opt_state": adam(D)}, "critic": {"opt_state": adam(NORM)}}),
    (
        {"opt_state": {"0": adam({"generator": D, "critic": NORM})}},
        {"generator": {"opt_state": {"0": adam(D)}}, "opt_state": {"0": adam({"generator": D, "critic": NORM})}},
    ),
    (p(zeros(D), ema_params=D), D),
    (p(zeros(D), ema_params=D), p(D)),
    (p(D), p(D, ema_params=D)),
    (p({"w": array(3)}, step=7), {"w": array(3).astype(jax.numpy.bfloat16)}),
    (p({"w": np.stack([array(3)] * 4)}), p({"w": array(3)})),
    (
        p({"w": np.stack([array(3)] * 4)}, batch_stats={"m": np.stack([array(3), array(3) + 2])}),
        p({"w": array(3)}, batch_stats={"m": array(3) + 1}),
    ),
    (p({"w": np.stack([array(3)] * 4, axis=1)}), p({"w": array(3)})),
    (
        {"optimizer": {"target": p({"kernel": D["kernel"]}), "state": {"step": 3, "param_states": p(OLD)}}},
        p(
            {"kernel": D["kernel"]},
            step=3,
            opt_state={"0": {"count": 3, "mu": {"kernel": D["kernel"]}, "nu": {"kernel": D["kernel"] ** 2}}},
        ),
    ),
    (p({"Conv_0": NORM, "Dense_1": D}), p({"Conv_0": NORM, "Dense_0": D})),
    (
        {"optimizer": {"target": {"mlp": D}, "state": {"step": 9, "param_states": {"mlp": {"v": array(3)}}}}},
        p({"mlp": D}, step=9, opt_state={"v": zeros(array(3))}),
    ),
    (
        p({"kernel": D["kernel"]}, batch_stats={"n": {"mean": array(3)}}),
        {"model": {**VALUES, "n": {"mean": {"value": array(3)}}}},
    ),
    (
        {"model": {"rngs": {"default": STREAM}}, "opt_state": {"mu": VALUES}, "step": {"value": np.uint32(9)}},
        {
            "model": {"rngs": {**STREAM, "key": {"value": KEY}}},
            "optimizer": {"opt_state": {"mu": VALUES}, "step": {"value": np.uint32(9)}},
        },
    ),
    ({"kernel": D["kernel"]}, VALUES),
    (VALUES, {"kernel": D["kernel"]}),
    (
        {"layers.0.weight": array(2, 3), "layers.1.weight": array(3, 2)},
        p({"linear_0": {"kernel": array(2, 3).T}, "linear_1": {"kernel": array(3, 2).T}}),
    ),
]
CELLS = [re.split(r"(?<!\\)\|", line)[2] for line in TABLE.splitlines() if line.startswith("| ")]
CALLS = [
    ", ".join(f"rules.{call}" for call in re.findall("`(.+?)`", cell)).replace("\\|", "|")
    for cell in CELLS
    if cell.strip() not in ("", "rules")  # the header, and titles
]


def test_every_row_has_a_case() -> None:
    """Every row with rules is tried."""
    assert len(CALLS) == len(CASES)


@pytest.mark.parametrize("calls, case", list(zip(CALLS, CASES, strict=False)), ids=CALLS)
def test_row(calls: str, case: tuple[Any, Any], format: str, tmp_path: Path) -> None:
    """The rules of a row turn the old tree into the new one; what the checkpoint lacks is the target's, zero."""
    stored, expected = case
    path = save(tmp_path / "old", stored, format=format)
    other = save(tmp_path / "other", OTHER, format=format)
    transforms = eval(f"[{calls}]", {"rules": rules, "other": other})
    target = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "addressable_shards") else leaf * 0, expected)
    restored = restore(path, target, transforms=transforms)
    jax.tree.map(_assert_same, restored, expected)
    plan = plan_restore(path, target)
    if plan.suggestion is not None and plan.suggestion.confident:
        jax.tree.map(_assert_equal, restore(path, target, transforms=plan.suggestion.rules), expected)


def _assert_same(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype if hasattr(expected, "dtype") else type(got) is type(expected)
    _assert_equal(got, expected)


def _assert_equal(got: Any, expected: Any) -> None:
    assert np.all(got == expected)
