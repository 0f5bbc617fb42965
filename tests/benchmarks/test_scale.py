"""The formulas of the page on scale hold for saves by real processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks import scale, scale_costs, scale_jobs, scale_play
from tests.support.team import team_of

LEAVES = 30


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_counts_of_real_processes(processes: int, tmp_path: Path) -> None:
    """Messages, files and bytes of a save in Orbax's format, and messages of a restore: as the formulas say."""
    team = team_of(processes)
    one = scale.measure(team, str(tmp_path), True, LEAVES)
    _check_messages(one, processes)
    assert sum(one["files"].values()) == scale_costs.files(True, processes, LEAVES, 2 * processes)
    names = [f"params.leaf_{number:06}" for number in range(LEAVES)]
    shard = [scale_jobs.LENGTH // (2 * processes)]
    assert one["bytes"]["array_metadatas"] == scale_costs.array_metadatas(processes, names, shard)
    expected = team.call("from tests.benchmarks import scale_jobs\nresult = scale_jobs.sharding_bytes(*args)", names)
    assert expected == [one["bytes"]["_sharding"]] * processes


@pytest.mark.parametrize("processes", [2, 4])
def test_files_of_a_msgpack_checkpoint(processes: int, tmp_path: Path) -> None:
    """There is one file for each shard of each array, and as many messages as in Orbax's format."""
    one = scale.measure(team_of(processes), str(tmp_path), False, LEAVES)
    _check_messages(one, processes)
    assert sum(one["files"].values()) == scale_costs.files(False, processes, LEAVES, 2 * processes)
    assert one["files"]["chunks"] == LEAVES * 2 * processes
    assert int(scale.counted_row(one)[-1]) == sum(scale_costs.messages_of_restore(processes).values())


def test_messages_of_many_that_one_process_plays() -> None:
    """The formula for messages holds for a hundred processes."""
    found = Counter(team_of(1).call(scale_play.barriers, 100)[0]["messages"])
    _check_at_least(found, 100)


def test_devices_of_a_thousand_hosts() -> None:
    """The ids of 8,000 devices take 127 kB in text: 12 characters each, 30,890 digits, less a comma, plus brackets."""
    assert scale_costs.of_devices(8_000) == 12 * 8_000 + (10 + 180 + 2_700 + 28_000) - 2 + 4


def _check_messages(one: dict[str, list[dict[str, Counter[str]]]], processes: int) -> None:
    restored = sum((Counter(result["messages"]) for result in one["restore"]), Counter[str]())
    assert restored == scale_costs.messages_of_restore(processes)
    _check_at_least(sum((Counter(result["messages"]) for result in one["save"]), Counter[str]()), processes)


def _check_at_least(found: Counter[str], processes: int) -> None:
    """Exactly as many as the formula says, except what is asked again and the tidying up after eight saves."""
    expected = scale_costs.messages(processes)
    assert found["key_value_set"] == expected["key_value_set"]
    assert 0 <= found["key_value_delete"] - expected["key_value_delete"] <= 1
    for method in ("blocking_key_value_get", "key_value_dir_get"):
        assert found[method] >= expected[method]
