"""Take apart the expressions that put paths together: f-strings, ``+``, ``/``, ``%``, ``format`` and ``join``."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Sequence

from .names import last_name
from .values import CHECKPOINT, ENTRY, LINK, MENTION, NOTHING, RUN, Tag, Value, text, texts, union

Part = str | ast.expr  # Text, or an expression whose value stands there
TextsOf = Callable[[ast.expr], list[str]]
_UNKNOWN = "{"
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath"}
_NO_VALUE = ast.Constant(None)  # what a template has no argument for
_MOST = 6  # texts of one expression
_SPECIFIER = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[sdrifge]")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def parts_of(node: ast.expr, texts_of: TextsOf) -> list[Part] | None:
    """Return the parts of a composed text or path, or None for other expressions; templates may have names."""
    if isinstance(node, ast.JoinedStr):
        return [_formatted(part) for part in node.values]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _flat(node, ast.Add)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _with_slashes(_flat(node, ast.Div))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        template = next(iter(texts_of(node.left)), None)
        given = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return None if template is None else _filled(template, _SPECIFIER, given)
    if isinstance(node, ast.Call) and last_name(node.func) in _PATHS and len(node.args) > 1:
        return _with_slashes(node.args)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "format":
            return _of_format(node, node.func, texts_of)
        return _of_join(node, node.func)
    return None


def _of_format(node: ast.Call, function: ast.Attribute, texts_of: TextsOf) -> list[Part] | None:
    template = next(iter(texts_of(function.value)), None)
    if template is None:
        return None
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    names = [match.group()[1:-1].partition(":")[0] for match in _PLACEHOLDER.finditer(template)]
    rest = iter(node.args)
    return _filled(template, _PLACEHOLDER, [named.get(name) or next(rest, _NO_VALUE) for name in names])


def _of_join(node: ast.Call, function: ast.Attribute) -> list[Part] | None:
    """Return the parts of ``os.path.join(…)``, ``path.joinpath(…)`` and ``"/".join([…])``."""
    if function.attr == "joinpath":
        return _with_slashes([function.value, *node.args])
    separator = _constant(function.value)
    if function.attr != "join" or separator not in (None, "/"):
        return None
    is_separator = separator == "/" or getattr(function.value, "attr", getattr(function.value, "id", "")) == "sep"
    if is_separator:
        joined = node.args[0] if node.args else None
        return _with_slashes(joined.elts) if isinstance(joined, ast.List | ast.Tuple) else None
    return _with_slashes(node.args)


def compose(parts: Sequence[Part], value_of: Callable[[ast.expr], Value]) -> Value:
    """Return what text or a path of several parts holds.

    It is about a checkpoint only if its end is: a file in a run directory, or beside a checkpoint, is none."""
    values = [text(part) if isinstance(part, str) else value_of(part) for part in parts]
    choices = [texts(value)[:_MOST] or [_UNKNOWN] for value in values]
    joined = [text("".join(one)) for one in itertools.islice(itertools.product(*choices), _MOST)]
    end = _end(parts, values)
    mentioned = any(tag.kind in (CHECKPOINT, MENTION) for value in values for tag in value if not tag.place)
    mention = frozenset([Tag(MENTION)]) if mentioned and len(parts) > 1 else NOTHING
    return union([*joined, end, mention])


def _end(parts: Sequence[Part], values: Sequence[Value]) -> Value:
    """Return what the last part makes of the whole."""
    told = [at for at, part in enumerate(parts) if part not in ("", "/")]
    if not told or isinstance(parts[told[-1]], str):
        return NOTHING
    last = told[-1]
    kinds = {CHECKPOINT, LINK, ENTRY} | ({RUN} if len(told) == 1 else set())
    before = parts[last - 1] if last else "/"
    is_name = not isinstance(before, str) or before.endswith("/") or before == ""
    return frozenset(tag for tag in values[last] if is_name and tag.kind in kinds and not tag.place)


def _formatted(part: ast.expr) -> Part:
    if isinstance(part, ast.FormattedValue):
        return part.value
    return str(part.value) if isinstance(part, ast.Constant) else part


def _flat(node: ast.expr, operator: type[ast.operator]) -> list[Part]:
    """Return the operands of a chain of one operator."""
    found: list[Part] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        found.append(_text_or(node.right))
        node = node.left
    return [_text_or(node), *reversed(found)]


def _with_slashes(parts: Sequence[Part]) -> list[Part]:
    between = [("/", _text_or(part)) for part in parts[1:]]
    return [_text_or(part) for part in parts[:1]] + [part for pair in between for part in pair]


def _filled(template: str, holes: re.Pattern[str], given: Sequence[ast.expr]) -> list[Part]:
    """Return a template's text, with the expressions that are put into it."""
    pieces = holes.split(template)
    filling = itertools.chain(given, itertools.repeat(_NO_VALUE))
    return [part for piece in pieces[:-1] for part in (piece, _text_or(next(filling)))] + [pieces[-1]]


def _text_or(part: Part) -> Part:
    constant = None if isinstance(part, str) else _constant(part)
    return part if constant is None else constant


def _constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
