"""The setting ``read_once``: processes that restore together read each byte once, and never wait for long."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.multiprocess import jobs, once_jobs
from tests.support.peers import needs
from tests.support.team import Team, team_of

# Looks are at most half a second apart, and the machine may be busy.
SLACK = 5.0
in_one_format = pytest.mark.parametrize(
    "orbax", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["orbax", "msgpack"]
)


def stored_bytes(folder: Path) -> int:
    """How many bytes the files below a folder have."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the bytes in /proc/self/io")
@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (3, "replicated"),
        pytest.param(4, "split", marks=pytest.mark.slow),
        pytest.param(2, "host", marks=pytest.mark.slow),
        pytest.param(2, "replicated", marks=pytest.mark.slow),
        pytest.param(4, "replicated", marks=pytest.mark.slow),
    ],
)
def test_each_byte_is_read_once(orbax: bool, tmp_path: Path, count: int, kind: str) -> None:
    """As the kernel counts them, the processes together read each byte once, and each about as much; bit for bit."""
    team = team_of(count)
    team.call(once_jobs.save, str(tmp_path), orbax)
    read = team.call(once_jobs.bytes_of_restore, str(tmp_path), kind)
    stored = stored_bytes(tmp_path)
    # Where shares of a msgpack file meet, both verify the checksum of the same block of 1 MiB.
    more = count * (2**15 if orbax else 2**20)
    assert 0.99 * stored < sum(read) < 1.01 * stored + more
    # The largest array is a quarter of all, so that a third is one and a part of the next.
    assert max(read) < stored / count + stored / 16 + more


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the bytes in /proc/self/io")
@needs("jax", 0, 7, why="makes no arrays that lie on devices of other processes only")
@in_one_format
def test_an_array_of_one_process(orbax: bool, tmp_path: Path) -> None:
    """Only that process wants it and reads it; those that all want are read once.

    A process cannot tell whether an array on its own device is on a device of each other one, too: if any process has
    none of some array, each reads all such arrays of its own."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    assert team.call(once_jobs.restore, str(tmp_path), "apart") == [[], []]
    read = team.call(once_jobs.bytes_of_restore, str(tmp_path), "apart")
    stored = stored_bytes(tmp_path)
    # Of five quarters: ``layer0``, a quarter of all, is read twice.
    more = 2 * (2**15 if orbax else 2**20)
    assert 1.24 * stored < sum(read) < 1.26 * stored + more


@in_one_format
def test_trees_of_all_kinds(orbax: bool, tmp_path: Path) -> None:
    """What is split, replicated, of odd dtypes, a key or no array comes back as without the setting."""
    team = team_of(4)
    team.call(jobs.save_mixed, str(tmp_path), orbax)
    for kind in ("plain", "turned"):
        team.call(once_jobs.restore_mixed, str(tmp_path), orbax, kind)


@in_one_format
def test_casts(orbax: bool, tmp_path: Path) -> None:
    """Values are cast by the process that reads them, unless not all want the same dtype."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    team.call(once_jobs.restore_cast, str(tmp_path))
    team.call(once_jobs.restore_cast_unlike, str(tmp_path))


@in_one_format
@pytest.mark.parametrize("absent", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_does_not_restore(orbax: bool, tmp_path: Path, absent: int) -> None:
    """The other one reads all by itself, after the bounded wait, and says so; later restores are shared again."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    outcome = team.run(once_jobs.restore_alone, str(tmp_path), only=[1 - absent], timeout=30)[1 - absent]
    assert outcome.ok, outcome
    assert "this process reads all arrays itself" in outcome.value[0]
    assert f"process {absent} of 2 did not reach barrier 'begin'" in outcome.value[0]
    assert outcome.seconds < 2 * once_jobs.WAIT + SLACK
    assert team.call(once_jobs.restore, str(tmp_path), "host") == [[], []]


@in_one_format
@pytest.mark.parametrize("job", [once_jobs.restore_unlike, once_jobs.restore_own])
def test_processes_that_restore_something_else(orbax: bool, tmp_path: Path, job: object) -> None:
    """Other targets, or other checkpoints under one path: each process gets what it asked for, at once."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    for outcome in team.run(job, str(tmp_path)):  # type: ignore[arg-type]
        assert outcome.ok, outcome
        assert "process 1 restores arrays with the digest" in outcome.value[0]
        assert outcome.seconds < SLACK


@in_one_format
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_cannot_open(orbax: bool, tmp_path: Path, failing: int) -> None:
    """It raises its error, and the others, who do not wait for it, read by themselves."""
    team = team_of(3)
    team.call(once_jobs.save, str(tmp_path), orbax)
    outcomes = team.run(once_jobs.restore_unopened, str(tmp_path), failing)
    assert outcomes[failing].kinds[0] == "StorageError", outcomes[failing]
    for other in {0, 1, 2} - {failing}:
        assert outcomes[other].ok, outcomes[other]
        assert "no opening in this test" in outcomes[other].value[0]
    assert max(outcome.seconds for outcome in outcomes) < SLACK
    assert team.call(once_jobs.restore, str(tmp_path), "host") == [[], [], []]


@in_one_format
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_finds_no_checkpoint(orbax: bool, tmp_path: Path, failing: int) -> None:
    """It gets its target, as without the setting, and the other reads by itself, soon."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    outcomes = team.run(once_jobs.restore_absent, str(tmp_path), failing)
    assert outcomes[failing].value == "untouched", outcomes[failing]
    found = ["process 0 finds no such checkpoint in", "process 1 restores"][failing]
    assert f"{found} {tmp_path}/{failing}" in outcomes[1 - failing].value[0], outcomes[1 - failing]
    assert max(outcome.seconds for outcome in outcomes) < SLACK
    assert team.call(once_jobs.restore, str(tmp_path), "host") == [[], []]


@in_one_format
def test_without_jit(orbax: bool, tmp_path: Path) -> None:
    """The devices exchange arrays all the same."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    assert team.call(once_jobs.restore_without_jit, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_cannot_read(orbax: bool, tmp_path: Path, failing: int) -> None:
    """It raises the error that it would raise alone; the other one reads by itself."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    outcomes = team.run(once_jobs.restore_failing, str(tmp_path), failing)
    assert outcomes[failing].kinds[0] == "StorageError"
    assert "Input/output error" in outcomes[failing].error
    other = outcomes[1 - failing]
    assert other.ok, other
    assert "Input/output error" in other.value[0]
    assert max(outcome.seconds for outcome in outcomes) < SLACK


@in_one_format
def test_threads_that_restore_at_once(orbax: bool, tmp_path: Path) -> None:
    """They take turns, so that no process gets bytes of another checkpoint."""
    team = team_of(3)
    team.call(once_jobs.save_two, str(tmp_path), orbax)
    assert team.call(once_jobs.restore_in_threads, str(tmp_path), 3) == [[], [], []]


@pytest.mark.slow
@in_one_format
@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_reads_for_too_long(orbax: bool, tmp_path: Path, late: int) -> None:
    """The others read by themselves, and so does it when it comes: nobody waits for an exchange."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    team.call(once_jobs.restore, str(tmp_path), "replicated")
    for outcome in team.run(once_jobs.restore_late, str(tmp_path), late):
        assert outcome.ok, outcome
        assert f"process {late} of 2 did not reach barrier 'read'" in outcome.value[0]


def test_a_damaged_checkpoint(orbax: bool, tmp_path: Path) -> None:
    """All processes raise the error, also where it is in a block of a msgpack file of which each reads a part."""
    team = team_of(2)
    team.call(once_jobs.save, str(tmp_path), orbax)
    largest = max((file for file in tmp_path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    status = largest.stat()
    with open(largest, "r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(largest, ns=(status.st_atime_ns, status.st_mtime_ns))
    for outcome in team.run(once_jobs.restore, str(tmp_path), "replicated"):
        assert outcome.kinds[0] == "ChecksumError", outcome
        assert outcome.seconds < SLACK


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        ("exchange", "killed"),
        pytest.param("read", "killed", marks=pytest.mark.slow),
        pytest.param("read", "hangs", marks=pytest.mark.slow),
        pytest.param("exchange", "hangs", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies(tmp_path: Path, stage: str, how: str) -> None:
    """While it reads: the other one reads by itself. In the exchange: it raises an error. Both within the bound."""
    team = Team(2)
    try:
        team.call(once_jobs.save, str(tmp_path), True)
        team.call(once_jobs.restore, str(tmp_path), "replicated")  # programs are compiled
        team.start(once_jobs.restore_dying, str(tmp_path), stage, how)
        outcome = team.finish(2 * once_jobs.WAIT + 2 * SLACK)[0]
        assert outcome.seconds < 2 * once_jobs.WAIT + SLACK
        if stage == "read":
            assert outcome.ok, outcome
            assert "process 1 of 2 did not reach barrier 'read'" in outcome.value[0]
        else:
            assert outcome.kinds[0] == "MultiprocessRestoreError", outcome
            assert "the exchange of arrays between processes" in outcome.error
    finally:
        team.close()
