"""Who reads what of whom: each pair of savers and restorers on every kind of tree; no pair is silently different."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interop import EVERYBODY, OURS

# What Orbax refuses to save fails in its threads, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all checkpoints of the table lie."""
    return tmp_path_factory.mktemp("interop")


@pytest.mark.parametrize("writer", OURS)
def test_we_save_every_kind(writer: str, folder: Path) -> None:
    """Both of our formats take all kinds of leaves and containers."""
    from tests.support.interop_table import TREES, accepted

    assert accepted(writer, folder) == tuple(TREES)


# By default: ours with each other, and with Flax's.
QUICK = {(one, other) for one in OURS for other in (*OURS, "flax on")} | {("flax on", one) for one in OURS}
PAIRS = [
    pytest.param(writer, reader, marks=() if (writer, reader) in QUICK else pytest.mark.slow)
    for writer in EVERYBODY
    for reader in EVERYBODY
]


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
