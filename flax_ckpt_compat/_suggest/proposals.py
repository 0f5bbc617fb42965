"""Propose steps: for whole trees, for the subtrees paired by what they hold, for optimizers, for what stays initial."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.numbered_names import numbered
from flax_ckpt_compat._core.text_formatting import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves, joined, node_at, topmost
from flax_ckpt_compat._suggest import differences, features, layouts
from flax_ckpt_compat._suggest.differences import Change, Gap, State
from flax_ckpt_compat._suggest.features import EMPTY, KEPT, MOMENTS, Look, Roles, fits, flatten, look, unnumbered
from flax_ckpt_compat._suggest.layouts import ANY, ProposedRule, all_but, either, listed, pattern_of, plain, rename
from flax_ckpt_compat._trees.leaf_sources import is_array, is_key

_ROUNDS = 8
# Renames of one round: more than a few make one mapping, and too many are no evidence for any.
_SEPARATE, _MAX_RENAMES = 24, 300
_LARGE = 20_000  # nodes of a tree for which each rule takes long
_MAX_KEPT, _MAX_PARTS = 40, 3
_NO_MOMENTS = "no moments"
_OWN = "to keep the target's own: "


class Pairing:
    """The steps from a checkpoint to a target."""

    def __init__(self, target: Node):
        self.target, self.goal = target, flatten(target)
        self.roles, self.memo = Roles(target), features.SubtreeMemo()

    def start(self, tree: Node, steps: tuple[ProposedRule, ...] = ()) -> State:
        """Return the state of a tree after some steps."""
        have = flatten(tree)
        wanted = ((path, seen) for path, seen in self.goal.items() if seen != EMPTY and have.get(path, KEPT) != KEPT)
        return State(tree, have, steps, {path for path, seen in wanted if fits(have[path], seen)}, Roles(tree))

    def tried(self, state: State, steps: Iterable[ProposedRule]) -> State | None:
        """Return the state after more steps, or None where a rule does not fit."""
        tree, steps = state.tree, tuple(steps)
        for step in steps:
            try:
                tree = step.rule.apply(tree, self.target)
            except CheckpointError:
                return None
        return self.start(tree, (*state.steps, *steps)) if steps else state

    def missing(self, state: State, at: Path = ()) -> list[Path]:
        """Return the target's leaves, below one of its nodes, that a tree lacks or has in other shapes."""
        have, goal = state.looks, self.goal
        others = (path for path in goal if path not in state.fitting and path[: len(at)] == at)
        lacking = [path for path in others if have.get(path) != KEPT]
        return [one for one in lacking if goal[one] != EMPTY or (one not in have and node_at(state.tree, one) is None)]

    def paired(self, state: State) -> State:
        """Return the state after the steps that the contents of both trees ask for, and for what they leave over."""
        return self.leftovers(self._repeated(state, self._groups))

    def leftovers(self, state: State) -> State:
        """Return the state after the steps that take what is left over to its only place."""
        goal = (self.target, self.goal, self.roles, self.memo)
        return self._repeated(state, lambda now: _renamed(differences.leftovers(now, *goal), now))

    def laid_out(self, state: State) -> State:
        """Return the state after the steps for arrays that have their names and lie otherwise."""
        arrays = {
            path: leaf
            for path, leaf in iter_leaves(state.tree)
            if isinstance(leaf, LeafHandle) and leaf.kind is LeafKind.ARRAY and path in self.goal
        }
        for step in layouts.steps(arrays, self.goal):
            after = self.tried(state, [step])
            state = after if after is not None and len(after.fitting) > len(state.fitting) else state
        return state

    def _repeated(self, state: State, groups_of: Callable[[State], Iterator[list[ProposedRule]]]) -> State:
        done = set[str]()
        for _ in range(_ROUNDS):
            before = state
            for group in groups_of(state) if self.missing(state) else ():
                steps = [step for step in group if step.rule.source not in done]
                done.update(step.rule.source for step in steps)
                after = self.tried(state, steps) if steps else None
                # Layers elsewhere that lie as they should must not be stacked, too, nor must others take their place.
                is_stack = any("stack(" in step.rule.source for step in steps)
                is_more = after is not None and len(after.fitting) > len(state.fitting)
                if after is not None and (after.fitting >= state.fitting or (is_more and not is_stack)):
                    state = after
                    if not self.missing(state):  # like steps for thousands of single branches may follow
                        return state
            if state is before:
                break
        return state

    def _groups(self, state: State) -> Iterator[list[ProposedRule]]:
        """Yield the steps of one round; those of one list make sense together alone."""
        rows, changes, stacks = list[Change](), list[Change](), dict[str, list[ProposedRule]]()
        for gap in self._gaps(state.tree, self.target, state.roles, ()):
            rows += gap.rows()
            for found in gap.others():
                if isinstance(found, Change):
                    changes += [found] if self._keeps_roles(found, state.roles) else []
                else:
                    stacks.setdefault(found[0].rule.source, found)
        yield from _renamed(rows, state)
        yield from stacks.values()
        yield from _renamed(changes, state)

    def _keeps_roles(self, change: Change, own: Roles) -> bool:
        """Return whether no optimizer's state, whose moments look like parameters, becomes more, or another thing."""
        olds, news = ([(*change.path, name) for name in side] for side in (change.old, change.new))
        was_optimizer = all(map(own.is_optimizer, olds))
        if was_optimizer:  # at the top, one must not become several, or the other way round
            as_many = bool(change.path) or len(own.roots) == len(self.roles.roots)
            return as_many and any(map(self.roles.is_optimizer, news))
        holds_one = any(root[:-1][: len(old)] == old for root in own.roots for old in olds)  # beside parameters
        return not (holds_one and all(map(self.roles.is_optimizer, news)))

    def _gaps(self, stored: Branch, target: Branch, own: Roles, path: Path) -> Iterator[Gap]:
        """Yield the branches of both trees that are paired and differ, the outer ones first."""
        gap = Gap(path, stored, target, self.memo)
        yield gap
        for name, child in stored.children.items():
            other = target.children.get(name)
            is_same = self.memo.named(child) == self.memo.named(other) or own.is_optimizer((*path, name))
            if is_same or not isinstance(child, Branch) or not isinstance(other, Branch):
                continue
            # Of one name, but without a leaf in common: where neither is there under another name, all of it changed.
            ours, theirs = gap.prints
            changed = bool(path) and self.memo.print(child) not in theirs and self.memo.print(other) not in ours
            if changed or not differences.torn(child, other, self.memo, at_root=not path):
                yield from self._gaps(child, other, own, (*path, name))


def _renamed(changes: Iterable[Change], state: State) -> Iterator[list[ProposedRule]]:
    """Yield renames, with parent names if a name is ambiguous; those that reuse old names together, in one step."""
    homes, kinds = dict[str, set[Path]](), dict[tuple[str, Path], Change]()
    for change in sorted(changes, key=lambda one: (len(one.path), -len(one.old))):
        homes.setdefault(str(change.patterns), set()).add(change.path)
        kinds.setdefault((str(change.patterns), unnumbered(change.path)), change)
    if not 0 < len(kinds) <= _MAX_RENAMES:
        return
    places: dict[str, set[Path]] = {}  # of the branches that have a child of each name
    for path, branch in iter_branches(state.tree):
        for name in branch.children:
            places.setdefault(name, set()).add(path)
    separate = _SEPARATE if sum(map(len, places.values())) < _LARGE else 2
    found: dict[str, dict[str, Change]] = {}
    for (key, _), change in kinds.items():
        prefix = _prefix(change, homes[key], places, state.roles)
        found.setdefault(prefix, {}).setdefault(key, change)
    for prefix, group in found.items():
        together: dict[str, str] = {}
        olds = {name: change for change in group.values() for name in change.old}
        reused = {name for one in group.values() for name in one.new if olds.get(name, one) is not one}
        for change in group.values():
            patterns = {
                prefix + pattern: to if prefix in ("", "^") else (r"\1/" + to.replace(r"\1", r"\2")).rstrip("/")
                for pattern, to in change.patterns.items()
            }
            if len(group) > separate or not reused.isdisjoint((*change.old, *change.new)):
                together |= patterns
            else:
                yield [rename(patterns, change.reason)]
        if together:
            yield [rename(together, f"{len(together)} names in one step, as new ones may be old ones")]


def _prefix(change: Change, homes: set[Path], places: dict[str, set[Path]], own: Roles) -> str:
    """Return a pattern for as many names above a child as tell it from children that keep their name."""
    path = change.path
    anywhere = any(ANY in pattern for pattern in change.patterns)
    everywhere = {at for name in (places if anywhere else change.old) for at in places.get(name, ())}
    inside = {at for at in everywhere if own.is_optimizer(at) and not own.is_optimizer(path)}
    moments = {at for at in inside if not MOMENTS.isdisjoint(at)}  # other names there may be an optimizer's own
    strangers = {unnumbered(at) for at in everywhere - moments - homes}
    if not strangers or not path:
        return "^" if strangers else ""
    like = unnumbered(path)
    numbers = zip(*(home for home in homes if unnumbered(home) == like), strict=True)
    # The last number alone, where it differs: others tell rows apart.
    shown = [
        rf"{literal(row[0])}\d+" if len({*names}) > 1 and (row := numbered(name)) else literal(name)
        for name, names in zip(path, numbers, strict=True)
    ]
    enough = (end for end in range(1, len(path)) if not any(other[-end:] == like[-end:] for other in strangers))
    count = next(enough, len(path))
    (first, *rest), inner, beside = shown[-count:], path[len(path) - count + 1 :], set[str]()
    if count == len(path) or path[-count] == "params":  # moments lie as their parameters do, below other names
        beside = {at[-count] for at in moments if len(at) >= count and at[len(at) - count + 1 :] == inner} & MOMENTS
    beside |= {home[0] for home in homes if home[1:] == inner and unnumbered(home) != like}
    above = "|".join(sorted({first, *map(literal, beside)}))
    return f"({'/'.join([f'(?:{above})' if beside - {path[-count]} else first, *rest])})/"


def preludes(pairing: Pairing, stored: Branch, looks: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the steps for whole trees: flax.optim's states, names that hold key paths, boxes around arrays."""
    optimizer = stored.children.get("optimizer")
    if isinstance(optimizer, Branch) and {"target", "state"} <= optimizer.children.keys():
        yield ProposedRule(rules.pre_optax(), "optimizer/target and optimizer/state are flax.optim's")
    ours, theirs = ({path: seen for path, seen in tree.items() if seen != EMPTY} for tree in (looks, pairing.goal))
    yield from _replicated(stored, ours, theirs)
    yield from _nested(ours, theirs)
    yield from _boxes(ours, theirs)


def _replicated(stored: Branch, looks: dict[Path, Look], target: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the step for a state that was saved with a replica for each device, all of it or most."""
    others = ((path, leaf) for path, leaf in iter_leaves(stored) if target.get(path) != looks.get(path))
    arrays = {path: looks[path] for path, leaf in others if is_array(leaf) or is_key(leaf)}
    counts = Counter(shape[0] for shape, _ in arrays.values() if shape).most_common(1)
    many = {path for path, (shape, _) in arrays.items() if shape[:1] == (counts[0][0],)} if counts else set[Path]()
    if not many or not any(len(arrays[path][0]) == 1 for path in many):
        return
    wanted = Counter(target.values())
    one = Counter((shape[1:], kind) for shape, kind in map(arrays.__getitem__, many))
    if 2 * (one & wanted).total() > max(wanted.total(), 2 * (Counter(arrays.values()) & wanted).total()):
        places = [joined(path) for path in topmost(stored, many)]
        rule = rules.unreplicate(*[f"^(?:{either(places)})"] if len(many) < len(looks) else ())
        yield ProposedRule(rule, f"all of it has an axis of {counts[0][0]} replicas more than the target")


def _nested(stored: dict[Path, Look], target: dict[Path, Look]) -> Iterator[ProposedRule]:
    """Yield the step for names that hold a whole key path, as in torch's state dicts."""
    parted = [path for path in stored if re.search("[/.]", "".join(path))]
    modules = {path[start:-1] for path in target for start in (0, 1) if parted and len(path) > start + 1}
    for separators in (("/~/", "/"), ("/~/",), ("/",), (".",)):
        held = [path for path in parted if any(separator in "".join(path) for separator in separators)]
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
                pattern = f"^(?:{all_but(tops, {path[0] for path in inner})})/.*"
        if not pattern and everywhere[0] < 0.5 and everywhere[1] > 0.9:
            # Leaves that are there without it, such as the step, stay as they are.
            ends = {path[-1] for path in inner if path not in outer}
            pattern, names = all_but(ends, {path[-1] for path in inner}) if is_new else ANY, {"value"}
        for name in names if pattern else ():
            change = {f"({pattern})$": rf"\1/{plain(name)}"} if is_new else {f"({pattern})/{literal(name)}$": r"\1"}
            yield rename(change, f"the {'target' if is_new else 'checkpoint'} has {name} around arrays")
            return


def collections(pairing: Pairing, state: State) -> list[ProposedRule]:
    """Return the ways in which collections became one tree, as linen's are in NNX: all of it, or a part."""
    stored, theirs = state.tree.children, pairing.target.children
    gone = [name for name, child in stored.items() if isinstance(child, Branch) and name not in theirs]
    gone = [name for name in gone if not state.roles.is_optimizer((name,))]
    new = [name for name in theirs if name not in stored and not pairing.roles.is_optimizer((name,))]
    if "params" not in gone or not 1 < len(gone) <= _MAX_PARTS:
        return []
    tops = ["", *sorted(new)] if len(new) <= _MAX_PARTS else [""]
    return [rename({f"^(?:{either(gone)})": plain(top)}, "the target has no such collections") for top in tops]


def finished(pairing: Pairing, state: State) -> State:
    """Return the state after the steps for optimizers and for new leaves."""
    state = pairing.tried(state, _single(pairing, state)) or state
    roles = state.roles
    for at in sorted(pairing.roles.roots):
        lacking = pairing.missing(state, at)
        if not lacking and not _is_longer(node_at(state.tree, at), node_at(pairing.target, at)):
            continue
        text, fields = literal(joined(at)), _fields(node_at(pairing.target, at))
        fitting = (path for path in state.fitting if path[: len(at)] == at)
        with_values = [path for path in lacking if pairing.goal[path] != EMPTY]
        new, there = ({pairing.roles.spot(path).field for path in side} for side in (with_values, fitting))
        # `_kept` names what is new among numbers alone, or fields beside those that are in place, such as amsgrad's.
        numbers_alone = fields == _NO_MOMENTS and node_at(state.tree, at) is not None
        if numbers_alone or (new and there & MOMENTS and new <= MOMENTS - there):
            continue
        for stored_at in sorted(roles.roots, key=lambda root: (root != at, root)):
            extra = {} if stored_at == at else {"stored_at": literal(joined(stored_at))}
            step = ProposedRule(rules.optimizer_state(text, **extra), f"both hold {fields}")
            tried = pairing.tried(state, [step])
            if tried and not pairing.missing(tried, at):
                kept = [path for path, seen in tried.looks.items() if seen == KEPT and path[: len(at)] == at]
                if begun := [path for path in kept if MOMENTS.intersection(path)]:
                    step = dataclasses.replace(step, reason=f"{step.reason}; initial values: {listed(begun)}")
                    tried = dataclasses.replace(tried, steps=(*state.steps, step))
                state = tried if len(tried.fitting) >= len(state.fitting) else state
                break
        else:
            had = [_fields(node_at(state.tree, root)) for root in sorted(roles.roots)]
            reason = f"the stored optimizer has {had[0]}, the target's has {fields}" if had else "no stored optimizer"
            if fields in had:
                reason = f"both hold {fields}, but in other places or for other parameters"
            state = pairing.tried(state, [ProposedRule(rules.from_target(text), _OWN + reason, keeps=(at,))]) or state
    for step in differences.copies(state, pairing.target, pairing.missing(state), pairing.memo):
        state = pairing.tried(state, [step]) or state
    return _kept(pairing, typed_keys(pairing, state))


def _single(pairing: Pairing, state: State) -> Iterator[ProposedRule]:
    """Yield the renames of numbers, and leaves at the top, that alone of their kind are left over: a tuple's step."""
    had, has = state.roles, pairing.roles
    olds = {path: seen for path, seen in state.looks.items() if path not in pairing.goal and not had.is_optimizer(path)}
    news = {path: pairing.goal[path] for path in pairing.missing(state) if not has.is_optimizer(path)}
    wanted, unused, places = Counter(news.values()), Counter(olds.values()), {seen: new for new, seen in news.items()}
    for old, seen in olds.items():
        new = places.get(seen, ())
        if wanted[seen] == unused[seen] == 1 and (not seen[0] or len(old) == len(new) == 1):
            reason = f"{joined(new)} is alone of that kind, as was {joined(old)}"
            yield rename({f"^{literal(joined(old))}$": plain(joined(new))}, reason)


def _is_longer(stored: Node, target: Node) -> bool:
    """Return whether a chain of optimizers has more members than the target's, which a restore would refuse."""
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return False
    is_longer = target.container.is_sequence and len(stored.children) > len(target.children)
    return is_longer or any(_is_longer(stored.children.get(name), child) for name, child in target.children.items())


def typed_keys(pairing: Pairing, state: State) -> State:
    """Return the state after steps for raw PRNG keys where the target has typed ones."""
    steps = []
    for path in state.looks:
        shape, kind = pairing.goal.get(path, EMPTY)
        leaf: Any = node_at(state.tree, path) if kind == "key" else None
        if not is_array(leaf) or (leaf.shape, leaf.dtype) != ((*shape, 2), np.uint32):
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
    arrays = sum(bool(pairing.goal[path][0]) and not pairing.roles.is_optimizer(path) for path in lacking)
    if arrays > len(state.fitting):
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
    steps = [ProposedRule(rule, _OWN + reason, keeps=tuple(groups[reason])) for reason, rule in kept.items()]
    return pairing.tried(state, steps) or state
