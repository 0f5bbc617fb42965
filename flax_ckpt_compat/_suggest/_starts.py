"""First steps that make the rest possible: other eras, other endings of names, collections that became others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.template import literal
from flax_ckpt_compat._core.tree import Branch, Node, Path
from flax_ckpt_compat._suggest._looks import Look, Roles, items
from flax_ckpt_compat._suggest._patterns import plain
from flax_ckpt_compat._suggest._rows import Step

_MAX_COLLECTIONS = 20
Candidate = tuple[tuple[Step, ...], int]  # steps, and how many leaves they are thought to find


def endings(stored: Node, target: Node) -> Iterator[Candidate]:
    """One more name, ``value``, at the end of every key path: the states of NNX have it and pure dicts do not."""
    ends = [Counter(path[-1] == "value" for path in items(tree) if path) for tree in (stored, target)]
    had, has = (count[True] / max(count.total(), 1) for count in ends)
    if has > 0.9 and had < 0.5:
        yield ((Step(rules.rename("([^/]+)$", r"\1/value"), "every leaf of the target is called value"),), 0)
    elif had > 0.9 and has < 0.5:
        yield ((Step(rules.rename("([^/]+)/value$", r"\1"), "every stored leaf is called value"),), 0)


def pre_optax(stored: Node) -> Candidate | None:
    optimizer = stored.children.get("optimizer") if isinstance(stored, Branch) else None
    if not isinstance(optimizer, Branch) or not {"target", "state"} <= optimizer.children.keys():
        return None
    return ((Step(rules.pre_optax(), "optimizer/target and optimizer/state are flax.optim's"),), 0)


def collections(stored: Branch, target: Branch, roles: Roles) -> Iterator[Candidate]:
    """Yield collections of the checkpoint that became the whole tree, or one part of it."""
    if len(stored.children) + len(target.children) > _MAX_COLLECTIONS:
        return
    kinds = ("params", "batch_stats")
    gone = {name: node for name, node in stored.children.items() if name not in target.children}
    present, had = [name for name in kinds if name in gone], Roles(stored)
    if "params" in gone:
        steps = tuple(Step(rules.unwrap(literal(name)), f"the target has no {name}") for name in present)
        yield (steps, _likeness(gone, present, target))
        yield ((Step(rules.move("params", ""), "the target has no params"),), _likeness(gone, ["params"], target))
    for name, child in target.children.items():
        if name not in stored.children and not roles.is_optimizer((name,)):
            # An optimizer's state has the shapes of the parameters, too, and is none of them.
            for names in ([one] for one in gone if not had.is_optimizer((one,))):
                steps = tuple(Step(rules.move(literal(one), plain(name)), f"{name} looks like {one}") for one in names)
                yield (steps, _likeness(gone, names, child))
            if len(present) > 1:
                steps = tuple(
                    Step(rules.move(literal(one), plain(name)), f"{name} looks like {one}") for one in present
                )
                yield (steps, _likeness(gone, present, child))
    if not any(name in target.children for name in stored.children):
        for name, child in target.children.items():
            yield (
                (Step(rules.wrap(name), f"{name} looks like the whole"),),
                _likeness(stored.children, list(stored.children), child),
            )


def _likeness(children: dict[str, Node], names: list[str], target: Node) -> int:
    """How many leaves have the same last name, shape and kind."""
    return (_ends({name: children[name] for name in names}) & _ends(target)).total()


def _ends(tree: Node | dict[str, Node]) -> Counter[tuple[str, Look]]:
    node = Branch(tree) if isinstance(tree, dict) else tree
    return Counter((_last(path), seen) for path, seen in items(node).items())


def _last(path: Path) -> str:
    return path[-2] if len(path) > 1 and path[-1] == "value" else (path[-1] if path else "")
