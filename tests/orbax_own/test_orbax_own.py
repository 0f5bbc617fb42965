"""Orbax's own published tests of its transformations, run on ours."""

import pytest

from tests.flax_own.run import DownloadError, Outcome
from tests.orbax_own import run

pytestmark = pytest.mark.slow  # downloads


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One run of Orbax's tests."""
    folder = tmp_path_factory.mktemp("orbax_own")
    try:
        wheel = run.download(folder)
    except DownloadError as error:
        pytest.skip(f"the wheel of Orbax that has its tests cannot be downloaded: {error}")
    return run.run_tests(run.extract_tests(wheel, folder))


def test_orbax_own_tests_pass(outcome: Outcome) -> None:
    """All of Orbax's tests of its transformations, none left out, pass on ours."""
    assert outcome.code == 0, outcome.output
    assert "16 passed" in outcome.closing_line
    assert not any(word in outcome.closing_line for word in ("skipped", "deselected", "failed"))


def test_it_was_ours_that_ran(outcome: Outcome) -> None:
    """The calls of those tests reached our functions and our class."""
    assert outcome.calls["apply_transformations"] > 12
    assert outcome.calls["merge_trees"] == 3
    assert outcome.calls["Transform"] >= 40
