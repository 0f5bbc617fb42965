"""Convert checkpoints of earlier eras of Flax: before linen, and before Optax."""

from __future__ import annotations

from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.numbered_names import linen_names
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_branches, node_at, show_path
from flax_ckpt_compat.rules import _nodes
from flax_ckpt_compat.rules._rule import Trees, rule

# Fields of a parameter's state in flax.optim → fields of optax's state, whose values are the same.
_MOMENTS = {frozenset(("grad_ema", "grad_sq_ema")): {"grad_ema": "mu", "grad_sq_ema": "nu"}}
_MOMENTS[frozenset(("momentum",))] = {"momentum": "trace"}


@rule
def pre_linen(trees: Trees, at: str = "params") -> Node:
    """Rename pre-linen modules to linen's names, below a path: ``Conv_0, Dense_1`` → ``Conv_0, Dense_0``.

    ``at`` is a pattern of whole key paths; with an optimizer's moments ``"params|opt_state/0/[mn]u"``."""
    new: dict[Path, dict[str, str]] = {}  # by key path of a module, the names in it
    for start in _nodes.select(trees.stored, [at]):
        modules = iter_branches(node_at(trees.stored, start), start)
        found = {path: linen_names(module.children) for path, module in modules}
        if all(name == other for names in found.values() for name, other in names.items()):
            raise _nodes.misfit(start, "has names that are linen's already; leave the rule out")
        new |= found

    def renamed(path: Path) -> Path:
        return tuple(new.get(path[:end], {}).get(name, name) for end, name in enumerate(path))

    return _nodes.rebuild(trees.stored, lambda path, leaf: [(renamed(path), leaf)])


@rule
def pre_optax(trees: Trees) -> Node:
    """Convert a checkpoint of ``flax.optim``, whose optimizer held the parameters, to a train state.

    The parameters go to ``params``, and the optimizer's step to ``step`` (unless there is one) and to the counts of the
    target's Adam and schedules. The moments of Adam and Momentum go to the target's ``mu``, ``nu`` and ``trace``
    (without a target, in ``opt_state/0``), and are dropped if the target has none. All else stays in place. Rules that
    rename modules can come before or after this one.
    """
    stored, target, _ = trees
    start = _optimizer(stored)
    # It may hold the dict of all collections, including ``params``, unlike the target's.
    is_nested = isinstance(node_at(stored, (*start, "target", "params")), Branch)
    is_nested = is_nested and node_at(target, ("params", "params")) is None
    has_target = isinstance(target, Branch)
    keeps_step = "step" not in stored.children and (not has_target or "step" in target.children)
    states = [*iter_branches(node_at(target, ("opt_state",)), ("opt_state",))]
    # By the names that flax.optim had for them, the states that moments go to.
    homes: dict[frozenset[str], list[Path]] = {names: [("opt_state", "0")] for names in _MOMENTS}
    for names, fields in _MOMENTS.items() if has_target else ():
        homes[names] = [home for home, branch in states if {*fields.values()} <= branch.children.keys()]

    def new_paths(path: Path) -> list[Path]:
        match path[len(start) :] if path[: len(start)] == start else ():
            case ("target", *below):
                return [tuple(below) if is_nested else ("params", *below)]
            case ("state", "step"):
                return [("step",)] if keeps_step else []
            case ("state", "param_states", *below):
                parameter = below[1:-1] if is_nested and below[:1] == ["params"] else below[:-1]
                return _moment_paths(stored, target, homes, path, tuple(parameter))
        return [path]

    tree = _nodes.rebuild(stored, lambda path, leaf: [(new, leaf) for new in new_paths(path)])
    step = node_at(stored, (*start, "state", "step"))
    for path, branch in states:
        has_moments = branch.children.keys() == {"count", "mu", "nu"} and node_at(tree, (*path, "mu")) is not None
        if not branch.children and node_at(tree, path) is None:
            tree = _nodes.put(tree, path, branch)  # a state without values, such as EmptyState
        elif step is not None and (has_moments or branch.children.keys() == {"count"}):
            tree = _nodes.put(tree, (*path, "count"), step)
    if not has_target and step is not None and node_at(tree, ("opt_state", "0", "mu")):
        tree = _nodes.put(tree, ("opt_state", "0", "count"), step)
    return tree


def _optimizer(stored: Node) -> Path:
    """Return the key path of the node with ``target`` and ``state``."""
    for start in ((), ("optimizer",)):
        if all(isinstance(node_at(stored, (*start, name)), Branch) for name in ("target", "state")):
            return start
    why = _nodes.near_names("optimizer/target", stored)
    raise TransformError(f"the checkpoint has no optimizer/target and optimizer/state, as flax.optim wrote them; {why}")


def _moment_paths(
    stored: Node, target: Node, homes: dict[frozenset[str], list[Path]], path: Path, parameter: Path
) -> list[Path]:
    """Return where the moment of a parameter goes, or none to drop it."""
    if isinstance(node_at(stored, path), Branch):
        return []  # plain gradient descent has an empty state for every parameter
    names = frozenset(node_at(stored, path[:-1]).children)
    if names not in _MOMENTS:
        return [path]
    places = [(*home, _MOMENTS[names][path[-1]]) for home in homes[names]]
    if len(places) > 1:
        places = [place for place in places if node_at(target, (*place, *parameter)) is not None]
    if len(places) > 1:
        states = show_path(path[: path.index("param_states") + 1])
        remedy = f"to begin these anew, rules.drop({states!r}) before this rule, and from_target for them"
        raise _nodes.misfit(path, f"would fit in {one_line(map(show_path, places))}; {remedy}")
    return [(*place, *parameter) for place in places]
