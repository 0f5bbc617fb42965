"""Dicts with the keys of an old namedtuple (``name``, ``fields``, ``values``) stay what they are, rules or not."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import serialization

from flax_ckpt_compat import checkpoints, plan_restore, rules
from flax_ckpt_compat.errors import MissingLeavesError
from tests.support.samples import Pair, fingerprint

Table = collections.namedtuple("Table", ["name", "fields", "values"])
COLUMNS = {"name": "m", "fields": {"0": "left", "1": "right"}, "values": {"0": 1, "1": 2}}
LISTS = {"name": "m", "fields": ["left", "right"], "values": [1.5, 2]}


@pytest.mark.parametrize("table", [COLUMNS, LISTS], ids=["dicts", "lists"])
@pytest.mark.parametrize("beside", [None, Pair(1, 2)], ids=["alone", "beside such a namedtuple"])
def test_a_users_dict_with_these_keys_survives_rules(table: Any, beside: Any, flag: bool, tmp_path: Path) -> None:
    """A rule about something else does not take it apart, also where the target has a namedtuple of its fields."""
    checkpoints.save_checkpoint(tmp_path, {"table": table, "old": np.ones(2), "pair": beside}, 1)
    target = {"table": table, "new": np.zeros(2), "pair": beside}
    given = [rules.rename("old", "new")]
    assert not plan_restore(tmp_path, target, transforms=given).missing
    restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=given)
    assert fingerprint(restored) == fingerprint({"table": table, "new": np.ones(2), "pair": beside})


def test_a_namedtuple_with_these_fields(flag: bool, tmp_path: Path) -> None:
    """Flax saves it and cannot restore it; ours gives it back, one inside of the other and inside of other pytrees."""
    inner = Table("in", {"0": "a"}, {"0": 1})
    tree = {"t": Table("out", collections.OrderedDict(inner=inner), (inner, 3)), "w": np.ones(2)}
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    for given in (None, [rules.cast("w", "float32")]):
        restored = checkpoints.restore_checkpoint(tmp_path, tree, orbax_transforms=given)
        assert fingerprint(restored["t"]) == fingerprint(tree["t"])


BAD = {
    "a subtree as a name": {"fields": {"0": {"z": "left"}, "1": "right"}, "values": {"0": 1, "1": 2}},
    "one name twice": {"fields": {"0": "left", "1": "left"}, "values": {"0": 1, "1": 2}},
    "more values": {"fields": {"0": "left", "1": "right"}, "values": {"0": 1, "1": 2, "2": 3}},
    "numbers as names": {"fields": {"0": 1, "1": 2}, "values": {"0": 1, "1": 2}},
    "no names": {"fields": 3, "values": {"0": 1, "1": 2}},
    "no values": {"fields": {"0": "left", "1": "right"}, "values": 3},
    "a list that is none": {"fields": {"a": "left", "b": "right"}, "values": {"a": 1, "b": 2}},
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_old_flax_wrote_is_not_taken_apart(case: str, flag: bool, tmp_path: Path) -> None:
    """Over a namedtuple target it is a dict like others: what the target asks for is missing, and nothing crashes."""
    checkpoints.save_checkpoint(tmp_path, {"p": {"name": "Pair", **BAD[case]}}, 1)
    for given in (None, [rules.rename("name", "name")]):
        with pytest.raises(MissingLeavesError) as caught:
            checkpoints.restore_checkpoint(tmp_path, {"p": Pair(0, 0)}, orbax_transforms=given)
        assert caught.value.missing == ("p/left", "p/right")


def test_old_namedtuples_that_moved(tmp_path: Path) -> None:
    """Rules find the fields of an old namedtuple also where the target has it at another path."""
    adam = optax.scale_by_adam().init({"v": np.zeros(3)})
    moments = {"1": {"w": np.full(3, 2.0)}, "2": {"w": np.full(3, 3.0)}}
    old = {"name": "ScaleByAdamState", "fields": {"0": "count", "1": "mu", "2": "nu"}}
    old["values"] = {"0": np.array(5), **moments}
    (tmp_path / "checkpoint_1").write_bytes(serialization.msgpack_serialize({"opt": old, "table": COLUMNS}))
    given = [rules.rename("(mu|nu)/w", r"\1/v"), rules.move("opt", "opt_state/0")]
    found = checkpoints.restore_checkpoint(tmp_path, {"opt_state": (adam,)}, orbax_transforms=given)["opt_state"][0]
    assert int(found.count) == 5 and found.mu["v"].tolist() == [2.0] * 3 and found.nu["v"].tolist() == [3.0] * 3
