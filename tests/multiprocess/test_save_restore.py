"""Trees over several processes come back bit for bit: on as many processes, on more, on fewer and on one."""

from pathlib import Path
from typing import Any

import jax
import pytest

from flax_ckpt_compat import checkpoints
from tests.multiprocess import jobs
from tests.support.samples import canonical
from tests.support.saves import use_flag
from tests.support.team import team_of

SPREADS = [
    (2, "plain", 2, "plain"),
    (2, "plain", 4, "turned"),
    (4, "plain", 2, "flat"),
    (4, "turned", 4, "plain"),
    (4, "flat", 1, "plain"),
]
# By default: more processes than saved it, and one, in both formats; as many in one of them.
BOTH, ONE = (1, 4), ((True, 0),)


@pytest.mark.parametrize(
    ("orbax", "writers", "kind", "readers", "onto"),
    [
        pytest.param(
            orbax,
            *spread,
            id=f"{'orbax' if orbax else 'msgpack'}-{'-'.join(map(str, spread))}",
            marks=() if number in BOTH or (orbax, number) in ONE else pytest.mark.slow,
        )
        for orbax in (False, True)
        for number, spread in enumerate(SPREADS)
    ],
)
def test_every_bit_comes_back_on_any_number_of_processes(
    orbax: bool, tmp_path: Path, writers: int, kind: str, readers: int, onto: str
) -> None:
    """Every process finds its shards of every array, of its own mesh, and process 0's value of all else."""
    paths = team_of(writers).call(jobs.save_mixed, str(tmp_path), orbax, kind)
    assert paths == [str(tmp_path / "checkpoint_1")] * writers
    for abstract in (False, True):
        team_of(readers).call(jobs.restore_mixed, str(tmp_path), orbax, onto, abstract)


@pytest.mark.parametrize("count", [2, 4])
def test_without_a_target_it_is_what_one_process_would_have_saved(orbax: bool, tmp_path: Path, count: int) -> None:
    """The same tree, as numpy in one process, saved by one process, restores to the same types and bits."""
    team_of(count).call(jobs.save_mixed, str(tmp_path / "shared"), orbax)
    split: dict[str, Any] = {name: values for name, (values, _) in jobs.VALUES.items() if orbax or name not in jobs.ODD}
    keys = jax.random.split(jax.random.key(7), jobs.KEYS)
    split |= {"keys": keys, "same_keys": keys}
    tree = {"split": split, "deep": [{"again": split["both"]}, ()], "plain": jobs.plain_leaves(0)}
    with use_flag(orbax):
        checkpoints.save_checkpoint(tmp_path / "alone", tree, 1)
    got = checkpoints.restore_checkpoint(tmp_path / "shared", None)
    wanted = checkpoints.restore_checkpoint(tmp_path / "alone", None)
    assert list(map(type, jax.tree.leaves(got))) == list(map(type, jax.tree.leaves(wanted)))
    assert canonical(got) == canonical(wanted)


@pytest.mark.parametrize("shape", ["bare", "nothing spread"])
def test_odd_trees(orbax: bool, tmp_path: Path, shape: str) -> None:
    """A single array as the whole tree, and a tree without any array of several processes."""
    team_of(2).call(jobs.save_and_restore_odd, str(tmp_path), orbax, shape)
    names = jobs.names(str(tmp_path))
    assert names == ["checkpoint_1", *(["checkpoint_1_gda"] if shape == "bare" and not orbax else [])]


def test_each_process_reports_its_share(orbax: bool, tmp_path: Path) -> None:
    """In a save, what it writes; in a restore, all that it reads."""
    first, second = team_of(2).call(jobs.reports, str(tmp_path), orbax)
    assert [total for total, _ in first] == [2**23 + 24, 2**24 + 24]
    assert [total for total, _ in second] == [2**23, 2**24 + 24]
    for total, done in [*first, *second]:
        assert done == sorted(done)
        assert done[-1] == total
        assert done.count(total) == 1
        assert len(done) > 1
