"""Propose the steps before and after pairing: eras, collections, optimizers' states, what the target keeps."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, joined, node_at, topmost
from flax_ckpt_compat._suggest import match_unused
from flax_ckpt_compat._suggest.layouts import ProposedRule, either, listed, pattern_of, plain, rename
from flax_ckpt_compat._suggest.leaf_features import EMPTY, KEPT, MOMENTS, Look, Roles, is_t5x, look
from flax_ckpt_compat._suggest.pairing import Pairing, State
from flax_ckpt_compat._trees.leaf_sources import is_array, is_key

_MAX_KEPT, _MAX_PARTS = 40, 3
_NO_MOMENTS = "no moments"


def preludes(pairing: Pairing, stored: Branch, looks: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the steps for whole trees: flax.optim's states, names that hold key paths, boxes around arrays."""
    optimizer = stored.children.get("optimizer")
    if isinstance(optimizer, Branch) and {"target", "state"} <= optimizer.children.keys():
        yield ProposedRule(rules.pre_optax(), "optimizer/target and optimizer/state are flax.optim's")
    ours, theirs = ({path: seen for path, seen in tree.items() if seen != EMPTY} for tree in (looks, pairing.goal))
    if is_t5x(stored) and ("step",) in theirs and ("state", "step") in ours and ("step",) not in ours:
        yield ProposedRule(rules.move("state/step", "step"), "state/step is T5X's")
    yield from _replicated(stored, theirs)
    yield from _nested(ours, theirs)
    yield from _boxes(ours, theirs)


def _replicated(stored: Branch, target: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the step for a state that was saved with a replica for each device, all of it or most."""
    arrays = {path: look(leaf) for path, leaf in iter_leaves(stored) if is_array(leaf) or is_key(leaf)}
    arrays = {path: seen for path, seen in arrays.items() if target.get(path) != seen}
    counts = Counter(shape[0] for shape, _ in arrays.values() if shape).most_common(1)
    many = {path for path, (shape, _) in arrays.items() if shape[:1] == (counts[0][0],)} if counts else set[Path]()
    if not many or not any(len(arrays[path][0]) == 1 for path in many):
        return
    wanted = Counter(target.values())
    one = Counter((shape[1:], kind) for shape, kind in map(arrays.__getitem__, many))
    if 2 * (one & wanted).total() > max(wanted.total(), 2 * (Counter(arrays.values()) & wanted).total()):
        places = [joined(path) for path in topmost(stored, many)]
        whole = len(many) == sum(look(leaf) != EMPTY for _, leaf in iter_leaves(stored))
        rule = rules.unreplicate() if whole else rules.unreplicate(f"^(?:{either(places)})")
        yield ProposedRule(rule, f"all of it has an axis of {counts[0][0]} replicas more than the target")


def _nested(stored: dict[Path, Look], target: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the step for names that hold a whole key path, as in torch's state dicts."""
    modules = {path[start:-1] for path in target for start in (0, 1) if len(path) > start + 1}
    for separators in (("/~/", "/"), ("/~/",), ("/",), (".",)):
        held = [path for path in stored if any(separator in "".join(path) for separator in separators)]
        held = [path for path in held if MOMENTS.isdisjoint(path)] or held
        apart = "|".join(map(re.escape, ("\0", *separators)))
        nested = [tuple(re.split(apart, "\0".join(path))) for path in held]
        found = sum(path in target or not modules.isdisjoint((path[:-1], path[1:-1])) for path in nested)
        # Names that are as they are in the target would be lost.
        if found * 2 >= len(held) and found > 2 * sum(path in target for path in held):
            for one in separators:
                yield ProposedRule(rules.nest(one), f"stored names are key paths joined with {one}")
            return


def _boxes(stored: dict[Path, Look], target: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the step for a level around arrays that one tree has: ``value`` in NNX's states, boxes with metadata."""
    for inner, outer, is_new in ((stored, target, True), (target, stored, False)):
        boxed = [path for path, seen in outer.items() if len(path) > 1 and inner.get(path[:-1]) == seen]
        names, pattern = {path[-1] for path in boxed}, ""
        everywhere = [sum(path[-1:] == ("value",) for path in tree) / max(len(tree), 1) for tree in (inner, outer)]
        if everywhere[1] < 1 and len(names) == 1 and not any(path in inner for path in outer if path[:-1] in inner):
            others, tops = [path for path in inner if (*path, *names) not in outer], {path[0] for path in boxed}
            pattern = pattern_of([path[:-1] for path in boxed], others, 2)
            if not pattern and tops.isdisjoint(path[0] for path in others):
                pattern = f"^(?:{either(tops)})/.*"
        if not pattern and everywhere[0] < 0.5 and everywhere[1] > 0.9:
            pattern, names = "[^/]+", {"value"}
        for name in names if pattern else ():
            change = (f"({pattern})$", rf"\1/{plain(name)}") if is_new else (f"({pattern})/{literal(name)}$", r"\1")
            yield ProposedRule(
                rules.rename(*change), f"the {'target' if is_new else 'checkpoint'} has {name} around arrays"
            )
            return


def collections(pairing: Pairing, stored: Branch) -> list[ProposedRule]:
    """Return the ways in which linen's collections became one tree, as NNX has it: all of it, or a part."""
    both, names = {"batch_stats", "params"}, pairing.target.children.keys() - stored.children.keys()
    if not both <= stored.children.keys() - pairing.target.children.keys():
        return []
    new = [name for name in names if not pairing.roles.is_optimizer((name,))]
    tops = ["", *sorted(new)] if len(new) <= _MAX_PARTS else [""]
    return [rename({f"^(?:{either(both)})": plain(top)}, "the target has no such collections") for top in tops]


def finished(pairing: Pairing, state: State) -> State:
    """Return the state after the steps for optimizers and for new leaves."""
    roles = Roles(state.tree)
    for at in sorted(pairing.roles.roots):
        if not pairing.missing(state, at) and not _is_longer(node_at(state.tree, at), node_at(pairing.target, at)):
            continue
        text, fields = literal(joined(at)), _fields(node_at(pairing.target, at))
        if fields == _NO_MOMENTS and node_at(state.tree, at) is not None:
            continue  # numbers alone, of which `_kept` names those that are new
        if _is_mostly_there(pairing, state, at):
            continue  # of a new field, as amsgrad's
        for stored_at in sorted(roles.roots, key=lambda root: (root != at, root)):
            extra = {} if stored_at == at else {"stored_at": literal(joined(stored_at))}
            step = ProposedRule(rules.optimizer_state(text, **extra), f"both hold {fields}")
            tried = pairing.tried(state, [step])
            if tried and not pairing.missing(tried, at):
                have = tried.looks
                kept = [path for path in have if have[path] == KEPT and path[: len(at)] == at]
                if begun := [path for path in kept if MOMENTS.intersection(path)]:
                    step = dataclasses.replace(step, reason=f"{step.reason}; initial values: {listed(begun)}")
                    tried = dataclasses.replace(tried, steps=(*state.steps, step))
                state = tried if tried.matched >= state.matched else state
                break
        else:
            had = [_fields(node_at(state.tree, root)) for root in sorted(roles.roots)]
            reason = f"the stored optimizer has {had[0]}, the target's has {fields}" if had else "no stored optimizer"
            if fields in had:
                reason = f"both hold {fields}, but in other places or for other parameters"
            state = pairing.tried(state, [ProposedRule(rules.from_target(text), reason, keeps=(at,))]) or state
    for step in match_unused.copies(state.tree, pairing.target, pairing.missing(state), pairing.memo):
        state = pairing.tried(state, [step]) or state
    return _kept(pairing, typed_keys(pairing, state))


def _is_mostly_there(pairing: Pairing, state: State, at: Path) -> bool:
    """Return whether all moments in an optimizer's state are in place but those of fields that are not stored."""
    wanted = [path for path, seen in pairing.goal.items() if path[: len(at)] == at and seen != EMPTY]
    lacking = set(pairing.missing(state, at))
    new = {pairing.roles.spot(path).field for path in wanted if path in lacking}
    there = {pairing.roles.spot(path).field for path in wanted if path not in lacking}
    return bool(new and there & MOMENTS) and new <= MOMENTS and new.isdisjoint(there)


def _is_longer(stored: Node, target: Node) -> bool:
    """Return whether a chain of optimizers has more members than the target's, which a restore would refuse."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return False
    if target.container.is_sequence and len(stored.children) > len(target.children):
        return True
    return any(_is_longer(stored.children.get(name), child) for name, child in target.children.items())


def typed_keys(pairing: Pairing, state: State) -> State:
    """Return the state after steps for raw PRNG keys where the target has typed ones."""
    steps = []
    for path, leaf in iter_leaves(state.tree):
        shape, kind = pairing.goal.get(path, EMPTY)
        if kind != "key" or not is_array(leaf) or (leaf.shape, leaf.dtype) != ((*shape, 2), np.uint32):
            continue
        if jax.eval_shape(jax.random.key_data, node_at(pairing.target, path)).shape == leaf.shape:  # not rbg's
            steps.append(ProposedRule(rules.wrap_key_data(f"^{literal(joined(path))}$"), "the target has a typed key"))
    return pairing.tried(state, steps) or state


def _fields(node: Node) -> str:
    """Return the names under which an optimizer keeps its arrays."""
    found = [name for path, leaf in iter_leaves(node) for name in path if name in MOMENTS or name == "count"]
    return ", ".join(dict.fromkeys(found)) if MOMENTS.intersection(found) else _NO_MOMENTS


def _kept(pairing: Pairing, state: State) -> State:
    lacking = set(pairing.missing(state))
    if sum(bool(pairing.goal[path][0]) and not pairing.roles.is_optimizer(path) for path in lacking) > state.matched:
        return state  # this is another model
    groups: dict[str, list[Path]] = {}
    for path in filter(joined, topmost(pairing.target, lacking)):  # no pattern names a child called ""
        there, wanted = node_at(state.tree, path), node_at(pairing.target, path)
        reason = "stored with other shapes" if there is not None else "nothing is stored there"
        if there is not None and not isinstance(there, Branch) and not isinstance(wanted, Branch):
            reason = f"stored {look(there)[0]}, target {look(wanted)[0]}"
        groups.setdefault(reason, []).append(path)
    if len(groups) + sum(map(len, groups.values())) > _MAX_KEPT:
        return state
    kept = {reason: rules.from_target(*(literal(joined(path)) for path in paths)) for reason, paths in groups.items()}
    steps = [ProposedRule(rule, reason, keeps=tuple(groups[reason])) for reason, rule in kept.items()]
    return pairing.tried(state, steps) or state
