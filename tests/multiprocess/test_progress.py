"""``progress`` in jobs of several processes: each tells of its own share."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess import progress_jobs
from tests.support.team import team_of


def test_each_process_reports_its_share(orbax: bool, tmp_path: Path) -> None:
    """In a save, what it writes; in a restore, all that it reads."""
    team = team_of(2)
    saved = team.call(progress_jobs.reports_of_save, str(tmp_path), orbax)
    assert [total for total, _ in saved] == [2**23 + 24, 2**23]
    restored = team.call(progress_jobs.reports_of_restore, str(tmp_path))
    assert [total for total, _ in restored] == [2**24 + 24, 2**24 + 24]
    for total, done in [*saved, *restored]:
        assert done == sorted(done)
        assert done[-1] == total
        assert done.count(total) == 1
        assert len(done) > 1
