"""Random trees through real Orbax on one side and ours on the other."""

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.errors import NameCollisionError
from tests.support.orbax_trees import load, save
from tests.support.peers import version
from tests.support.profiles import examples
from tests.support.saves import new_folder
from tests.support.trees import ML_DTYPES, NUMPY_DTYPES, arrays, fingerprint

# The other dtypes, and texts under names with ``/`` or ``~``, are stored as what real Orbax can read.
KNOWN = [d for d in NUMPY_DTYPES + ML_DTYPES if d.kind not in "mMUS" and d.name not in ("uint4", "float128")]
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/~"), max_size=6)
LEAVES = st.one_of(
    arrays(KNOWN).filter(lambda array: array.size > 0),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    st.none(),
)
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=4), st.lists(inner, max_size=4)),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def _c_order(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _c_order(child) for name, child in tree.items()}
    if isinstance(tree, list):
        return [_c_order(child) for child in tree]
    return np.array(tree, order="C") if isinstance(tree, np.ndarray) else tree


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES)
def test_real_orbax_and_we_read_each_other(tree: Any) -> None:
    """To the last bit, and in the same structure; trees that would collide are not given to real Orbax."""
    with new_folder() as folder:
        try:
            path = save(Path(folder) / "ours", tree)
        except NameCollisionError:
            return
        assert fingerprint(ocp.PyTreeCheckpointer().restore(path)) == fingerprint(tree)
        if version("orbax-checkpoint") >= (0, 12):  # older ones lose arrays of some names when they save
            ocp.PyTreeCheckpointer().save(Path(folder) / "theirs", _c_order(tree))
            assert fingerprint(load(Path(folder) / "theirs")) == fingerprint(tree)
