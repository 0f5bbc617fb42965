"""Find the tests that hold where an expression is evaluated: those around it, and those before that would have left."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .modules import Function, Module

Guard = tuple[ast.expr, bool]  # A test, and whether it was true

_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)


def guards(module: Module, node: ast.AST) -> Iterator[Guard]:
    """Give the tests whose result is known at a node, up to the function around it."""
    for child, parent in module.above(node):
        if isinstance(parent, ast.If | ast.While | ast.IfExp):
            yield from _of_branch(parent, child)
        elif isinstance(parent, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            if not isinstance(child, ast.comprehension):
                yield from ((test, True) for part in parent.generators for test in part.ifs)
        elif isinstance(parent, ast.comprehension):
            yield from ((test, True) for test in parent.ifs if test is not child and child is not parent.iter)
        elif isinstance(parent, ast.BoolOp):
            yield from _of_operands(parent, child)
        if isinstance(child, ast.stmt):
            yield from _of_block(parent, child)
        if isinstance(parent, Function):
            return


def _of_branch(parent: ast.If | ast.While | ast.IfExp, child: ast.AST) -> Iterator[Guard]:
    if child is parent.test:
        return
    body = parent.body if isinstance(parent.body, list) else [parent.body]
    yield parent.test, any(child is one for one in body)


def _of_operands(parent: ast.BoolOp, child: ast.AST) -> Iterator[Guard]:
    """Give what holds beside an operand: of ``and`` all others, whose order says nothing; of ``or`` those before."""
    if isinstance(parent.op, ast.And):
        yield from ((value, True) for value in parent.values if value is not child)
        return
    for value in parent.values:
        if value is child:
            return
        yield value, False


def _of_block(parent: ast.AST, child: ast.stmt) -> Iterator[Guard]:
    """Give the tests of statements before one in its block that would have left the block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and any(one is child for one in block):
            for statement in block:
                if statement is child:
                    return
                if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], _LEAVES):
                    yield statement.test, False
                elif isinstance(statement, ast.Assert):
                    yield statement.test, True
