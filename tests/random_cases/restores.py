"""Random trees restored into random targets: both formats against real legacy Flax and against each other."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from flax.training import checkpoints as flax_checkpoints
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat.errors import CheckpointError
from tests.random_cases.trees import pairs
from tests.support.samples import canonical
from tests.support.saves import use_flag

POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "missing_leaves": st.sampled_from(["error", "warn", "ignore"]),
        "shape_mismatch": st.sampled_from(["error", "warn", "ignore"]),
        "dtype": st.sampled_from(["stored", "target"]),
    },
)
CASES = st.tuples(pairs(), POLICIES, st.sampled_from([None, None, {}]))


def check(pair: tuple[Any, Any], policies: dict[str, str], transforms: Any) -> None:
    """Both formats give the same, or an error of one class; by default what Flax gives where it gives anything."""
    tree, target = pair
    with TemporaryDirectory() as folder:
        with use_flag(False):
            flax_checkpoints.save_checkpoint(f"{folder}/theirs", tree, 1)
        for name, flag in (("msgpack", False), ("orbax", True)):
            with use_flag(flag):
                checkpoints.save_checkpoint(f"{folder}/{name}", tree, 1)
        with config.override(**policies):
            ours = [outcome(Path(folder, name), target, transforms) for name in ("msgpack", "orbax", "theirs")]
        assert ours[0] == ours[1] == ours[2]
        if transforms is None and not policies and not _is_abstract(target):
            try:
                expected = flax_checkpoints.restore_checkpoint(f"{folder}/theirs", target)
            except Exception:
                return
            assert ours[0] == canonical(expected)


def outcome(path: Path, target: Any, transforms: Any) -> Any:
    """What a restore gives, comparable, or the class of its error; other errors than ours are failures."""
    try:
        return canonical(checkpoints.restore_checkpoint(path, target, orbax_transforms=transforms))
    except CheckpointError as error:
        return type(error).__name__


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
