"""The last steps: optimizers' states, and what the target has to keep because nothing stored belongs there."""

from __future__ import annotations

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.template import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, iter_leaves, topmost
from flax_ckpt_compat._suggest._looks import EMPTY, MOMENTS, Roles, fits, flatten, look, node_at
from flax_ckpt_compat._suggest._outcome import unused
from flax_ckpt_compat._suggest._pairing import Pairing, State
from flax_ckpt_compat._suggest._rows import Step
from flax_ckpt_compat._trees.leaf_sources import handles_of


def finished(search: Pairing, state: State, stored: Node) -> State:
    """Return the state after the steps for optimizers and for new leaves."""
    roles = Roles(state.tree)
    for at in sorted(search.roles.roots):
        if missing(state.tree, search.target, at):
            state = _optimizer(search, state, at, roles)
    return _kept(search, state, stored)


def missing(tree: Node, target: Node, at: Path = ()) -> list[Path]:
    """Key paths of the target's leaves, below one of its nodes, that a tree lacks or has in other shapes."""
    have, goal = flatten(node_at(tree, at)), flatten(node_at(target, at))
    inner = {path[:end] for path in have for end in range(len(path))}
    return [
        (*at, *path)
        for path, seen in goal.items()
        if (path not in have and path not in inner) or (seen != EMPTY and not fits(have.get(path, EMPTY), seen))
    ]


def _optimizer(search: Pairing, state: State, at: Path, roles: Roles) -> State:
    text, theirs = literal("/".join(at)), node_at(search.target, at)
    for stored_at in sorted(roles.roots, key=lambda root: (root != at, root)):
        extra = {} if stored_at == at else {"stored_at": literal("/".join(stored_at))}
        step = Step(rules.optimizer_state(text, **extra), f"both hold {_fields(theirs)}")
        tried = search.tried(state, (step,))
        if tried is not None and not missing(tried.tree, search.target, at) and _takes_moments(tried.tree, at):
            return tried if tried.matched >= state.matched else state
    ours = [_fields(node_at(state.tree, root)) for root in sorted(roles.roots)]
    return search.tried(state, (Step(rules.from_target(text), _other_optimizer(ours, _fields(theirs))),)) or state


def _other_optimizer(ours: list[str], theirs: str) -> str:
    """Why nothing of the stored optimizers is taken."""
    if not ours:
        return "no stored optimizer"
    if theirs in ours:
        return f"both hold {theirs}, but in other places or for other parameters"
    return f"the stored optimizer has {ours[0]}, the target's has {theirs}"


def _takes_moments(tree: Node, at: Path) -> bool:
    return any(handles_of(leaf) and MOMENTS & set(path) for path, leaf in iter_leaves(node_at(tree, at)))


def _fields(node: Node) -> str:
    """Return the names under which an optimizer keeps its arrays."""
    found = [
        name for _, branch in iter_branches(node) for name in branch.children if name in MOMENTS or name == "count"
    ]
    return ", ".join(dict.fromkeys(found)) or "no moments"


def _kept(search: Pairing, state: State, stored: Node) -> State:
    lacking = set(missing(state.tree, search.target))
    arrays = [path for path in lacking if search.goal[path][0] and not search.roles.is_optimizer(path)]
    if len(arrays) > state.matched:
        return state  # this is another model
    roles = Roles(stored)
    idle = unused(stored, state.tree, search.goal)
    rivals = {seen for path, seen in idle.items() if not roles.is_optimizer(path)}
    steps: dict[str, list[str]] = {}
    for path in topmost(search.target, lacking):
        leaves = flatten(node_at(search.target, path)).values()
        if path and not any(len(seen[0]) > 1 and seen in rivals for seen in leaves):
            steps.setdefault(_reason(state.tree, search.target, path), []).append(literal("/".join(path)))
    if len(steps) + sum(map(len, steps.values())) > 40:
        return state
    all_steps = tuple(Step(rules.from_target(*paths), reason) for reason, paths in steps.items())
    return (search.tried(state, all_steps) if all_steps else None) or state


def _reason(tree: Node, target: Node, path: Path) -> str:
    there, wanted = node_at(tree, path), node_at(target, path)
    if there is None:
        return "nothing stored belongs there"
    if isinstance(there, Branch) or isinstance(wanted, Branch):
        return "stored with other shapes"
    return f"stored {look(there)[0]}, target {look(wanted)[0]}"
