"""Trees and leaves saved and restored on both backends, and to and from real Flax and real Orbax, each pair of them."""

from pathlib import Path
from typing import Any

import flax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.errors import CheckpointError
from tests.support.interop import EVERYBODY, OURS
from tests.support.peers import FROZEN_DICT_TAKES_INT_KEYS, ORBAX_HAS_TYPED_KEYS
from tests.support.profiles import examples
from tests.support.samples import FLAX_KNOWS, SAMPLES, Fields, Pair, canonical, fingerprint
from tests.support.saves import use_flag
from tests.support.trees import keys, leaves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all checkpoints of the table lie."""
    return tmp_path_factory.mktemp("interop")


# What Orbax refuses to save fails in its threads, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("writer", OURS)
def test_we_save_every_kind(writer: str, folder: Path) -> None:
    """Both of our formats take all kinds of leaves and containers."""
    from tests.support.interop_table import TREES, accepted

    assert accepted(writer, folder) == tuple(TREES)


# By default: ours with each other, and with Flax's; and what real Orbax reads of ours.
QUICK = {(one, other) for one in OURS for other in (*OURS, "flax on")} | {("flax on", one) for one in OURS}
QUICK |= {("ours on", "PyTree"), ("ours on", "v1")}
PAIRS = [
    pytest.param(writer, reader, marks=() if (writer, reader) in QUICK else pytest.mark.slow)
    for writer in EVERYBODY
    for reader in EVERYBODY
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_no_pair_is_silently_different(writer: str, reader: str, folder: Path) -> None:
    """Every kind comes back equal, or different as it is written down, or with an error; ours refuse nothing."""
    from tests.support.interop_table import REFUSALS, REFUSED, REFUSED_BY_OLD_ORBAX, ROOTS, ZOO, accepted, outcome, read

    names = accepted(writer, folder)
    readable = read(writer, reader, ("np f64",), folder)
    got = read(writer, reader, tuple(name for name in names if name in ZOO), folder) if readable else {}
    for root in [name for name in names if name in ROOTS and readable]:
        got.update(read(writer, reader, (root,), folder))
    outcomes = {kind: outcome(writer, reader, kind, got[kind]) if kind in got else REFUSED for kind in names}
    wrong = {kind: what for kind, what in outcomes.items() if what.startswith("UNDOCUMENTED")}
    assert not wrong
    refused = {kind for kind, what in outcomes.items() if what == REFUSED}
    if reader in OURS or writer in OURS:
        old = () if reader in OURS and writer in OURS else REFUSED_BY_OLD_ORBAX
        assert refused <= {*REFUSALS.get((writer, reader), ()), *old}


ORBAX_KNOWS = ["dict", "list", "tuple", "namedtuple", "dataclass", "TrainState", "masked", "nnx", "registered", "keyed"]


@pytest.mark.parametrize("name", SAMPLES)
def test_everything_comes_back(name: str, flag: bool, tmp_path: Path) -> None:
    """The same containers, Python types, dtypes, shapes and bytes come back, on both backends.

    So they do of what Flax wrote, by itself or through Orbax, and where real Orbax reads our directories, given the
    tree; what Flax wrote by itself is the same without a target, too."""
    tree = SAMPLES[name]()
    path = checkpoints.save_checkpoint(tmp_path / "ours", tree, 1)
    assert fingerprint(checkpoints.restore_checkpoint(path, tree)) == fingerprint(tree)
    if name == "nnx" and not ORBAX_HAS_TYPED_KEYS:
        return
    if flag and name in ORBAX_KNOWS:
        args = ocp.checkpoint_utils.construct_restore_args(tree)
        restored = ocp.PyTreeCheckpointer().restore(path, item=tree, restore_args=args)
        assert canonical(restored) == canonical(tree)
    if name in ([*ORBAX_KNOWS, "int keys", "FrozenDict", "OrderedDict"] if flag else FLAX_KNOWS):
        with use_flag(flag):
            flax_checkpoints.save_checkpoint(tmp_path / "flax", tree, 1)
            raw = None if flag else flax_checkpoints.restore_checkpoint(tmp_path / "flax", None)
        assert fingerprint(checkpoints.restore_checkpoint(tmp_path / "flax", tree)) == fingerprint(tree)
        assert flag or fingerprint(checkpoints.restore_checkpoint(tmp_path / "flax", None)) == fingerprint(raw)


TREES = st.recursive(
    leaves().filter(lambda leaf: not isinstance(leaf, str | bytes) or len(leaf) < 1000),
    lambda inner: st.one_of(
        st.dictionaries(keys(), inner, max_size=4),
        st.dictionaries(st.integers(-5, 50), inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(inner, inner).map(lambda pair: Fields(*pair)),
        st.dictionaries(keys(), inner, max_size=3).map(flax.core.freeze),
    ),
    max_leaves=10,
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES)
def test_random_trees_come_back(tree: Any, flag: bool, tmp_path: Path) -> None:
    """Random trees come back to the last bit, or are refused because two leaves would have one stored name."""
    try:
        checkpoints.save_checkpoint(tmp_path, tree, 1, overwrite=True)
    except CheckpointError as error:
        too_old = not FROZEN_DICT_TAKES_INT_KEYS and "string keys" in str(error)
        assert too_old or (flag and ("name" in str(error) or "surrogate" in str(error)))
        return
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path, tree)) == fingerprint(tree)


def test_static_fields_come_from_the_target(flag: bool, tmp_path: Path) -> None:
    """Fields outside the pytree are not stored: the target's own stay."""
    checkpoints.save_checkpoint(tmp_path, Fields(1, 2, label="saved"), 1)
    assert checkpoints.restore_checkpoint(tmp_path, Fields(0, 0, label="mine")) == Fields(1, 2, label="mine")


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    """On Orbax, two key paths with one stored name are refused before writing."""
    with use_flag(True), pytest.raises(ValueError, match=r"a\.b"):
        checkpoints.save_checkpoint(tmp_path, {"a.b": 1, "a": {"b": 2}}, 1)
    assert list(tmp_path.iterdir()) == []
