"""Flax's own published tests of its checkpoints module, run on our functions."""

import pytest

from tests.flax_own import run

pytestmark = pytest.mark.slow  # downloads


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> run.Outcome:
    """One run of Flax's tests."""
    folder = tmp_path_factory.mktemp("flax_own")
    try:
        archive = run.download(folder)
    except run.DownloadError as error:
        pytest.skip(f"Flax's source distribution, which has the tests, cannot be downloaded: {error}")
    return run.run_tests(run.extract_tests(archive, folder))


def test_flax_own_tests_pass(outcome: run.Outcome) -> None:
    """Flax's tests of save, restore, listing and natural order pass on our functions."""
    assert outcome.code == 0, outcome.output


def test_only_the_two_refusals_are_left_out(outcome: run.Outcome) -> None:
    """Exactly the two cases that pin Flax's refusal of a bare leaf and an empty tree are not run."""
    assert len(outcome.deselected) == 2, outcome.output
    assert "2 deselected" in outcome.closing_line


def test_it_was_our_functions_that_ran(outcome: run.Outcome) -> None:
    """The calls of those tests reached our functions, and none reached Flax's originals."""
    assert outcome.calls.get("ours.save_checkpoint", 0) > 20
    assert outcome.calls.get("ours.restore_checkpoint", 0) > 20
    assert not [name for name in outcome.calls if name.startswith("flax.")]
