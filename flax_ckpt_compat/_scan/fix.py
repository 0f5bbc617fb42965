"""Change the imports of a program, and file operations that can be made safe; formatting and comments stay.

Needs libcst (``pip install libcst``), which keeps every character that is not changed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

from .project import Finding

_API = "flax.training.checkpoints"
_OURS = "flax_ckpt_compat.checkpoints"
_Line = cst.SimpleStatementLine | cst.BaseCompoundStatement


class UnchangedError(Exception):
    """Code that cannot be changed, though it can be scanned."""


def fix(code: str, findings: Iterable[Finding]) -> str:
    """Return the code with our imports, and with file operations that work for both formats.

    - Imports of `flax.training.checkpoints` become those of `flax_ckpt_compat.checkpoints`.
      That module has all names of Flax's, also underscored ones.
    - ``os.path.isfile(checkpoint)`` becomes ``os.path.exists(checkpoint)``.
    - The statement ``os.remove(checkpoint)`` removes a directory, too.

    Raises:
        UnchangedError: the code is nested too deeply, or libcst does not know its syntax yet.
    """
    try:
        return _fixed(code, findings)
    except RecursionError as error:
        raise UnchangedError("its code is nested too deeply to be written anew") from error
    except cst.ParserSyntaxError as error:
        raise UnchangedError(f"libcst does not read line {error.raw_line}") from error


def _fixed(code: str, findings: Iterable[Finding]) -> str:
    wrapper = MetadataWrapper(cst.parse_module(code))
    fixer = _Fixer({(found.line, found.column): found.kind for found in findings})
    fixed = wrapper.visit(fixer)
    fixed = AddImportsVisitor(fixer.context).transform_module(fixed)
    return (with_standard_import(fixed, "shutil") if fixer.uses_shutil else fixed).code


class _Fixer(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, kinds: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self.context, self.uses_shutil = CodemodContext(), False
        self._kinds = kinds

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: ARG002
        """Pass over the names of modules: they are not expressions."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: ARG002
        """Pass over the names of modules: they are not expressions."""
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        """Change an import, into two where it names other things as well; and the removal of a file."""
        if len(updated_node.body) != 1:
            return updated_node
        statement = updated_node.body[0]
        if isinstance(statement, cst.Import | cst.ImportFrom):
            first, *others = _with_ours(statement)
            lines = [updated_node.with_changes(body=[first]), *(cst.SimpleStatementLine([other]) for other in others)]
            return cst.FlattenSentinel(lines)
        if isinstance(statement, cst.Expr) and self._kind(original_node.body[0]) == "remove":
            return updated_node.with_changes(body=[self._removal(statement)])
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:  # noqa: ARG002
        """Change ``flax.training.checkpoints`` where it is written out."""
        if get_full_name_for_node(updated_node) != _API:
            return updated_node
        AddImportsVisitor.add_needed_import(self.context, _OURS)
        return cst.parse_expression(_OURS)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Ask whether a checkpoint exists, instead of whether it is a file."""
        is_asked = get_full_name_for_node(updated_node.func) == "os.path.isfile"
        if not is_asked or self._kind(original_node) != "is-file":
            return updated_node
        return updated_node.with_changes(func=cst.parse_expression("os.path.exists"))

    def _kind(self, node: cst.CSTNode) -> str | None:
        start = self.get_metadata(PositionProvider, node).start
        return self._kinds.get((start.line, start.column))

    def _removal(self, statement: cst.Expr) -> cst.Expr:
        call = statement.value
        if not isinstance(call, cst.Call) or len(call.args) != 1:
            return statement
        is_known = get_full_name_for_node(call.func) in {"os.remove", "os.unlink"}
        if not is_known or not isinstance(call.args[0].value, cst.Name | cst.Attribute):
            return statement  # an expression with effects must not be evaluated twice
        self.uses_shutil = True
        code = cst.Module([]).code_for_node
        path, remove = code(call.args[0].value), code(call)
        # rmtree refuses links.
        is_directory = f"os.path.isdir({path}) and not os.path.islink({path})"
        return cst.Expr(cst.parse_expression(f"shutil.rmtree({path}) if {is_directory} else {remove}"))


def _with_ours(statement: cst.Import | cst.ImportFrom) -> Iterator[cst.Import | cst.ImportFrom]:
    """Give the statements that import the same names, those of the legacy API from us."""
    if isinstance(statement, cst.ImportFrom):
        yield from _from_ours(statement)
        return
    ours = [alias for alias in statement.names if alias.evaluated_name == _API]
    rest = [alias for alias in statement.names if alias not in ours]
    # Without "as", the import binds `flax`, which other code may need.
    rest += [cst.ImportAlias(cst.parse_expression("flax.training")) for alias in ours if alias.asname is None]  # type: ignore[arg-type]
    if rest:
        yield statement.with_changes(names=_without_last_comma(rest)) if ours else statement
    for alias in ours:
        if alias.asname or not rest:
            name = cst.parse_expression(_OURS)
            yield statement.with_changes(names=[cst.ImportAlias(name, alias.asname)])  # type: ignore[arg-type]


def _from_ours(statement: cst.ImportFrom) -> Iterator[cst.ImportFrom]:
    module = get_full_name_for_node(statement.module) if statement.module and not statement.relative else None
    if module not in (_API, "flax.training"):
        yield statement
        return
    if isinstance(statement.names, cst.ImportStar):
        yield statement.with_changes(module=cst.parse_expression(_OURS)) if module == _API else statement
        return
    is_api = module == _API
    ours = [alias for alias in statement.names if is_api or alias.evaluated_name == "checkpoints"]
    rest = [alias for alias in statement.names if alias not in ours]
    target = cst.parse_expression(_OURS if is_api else "flax_ckpt_compat")
    if rest:
        yield statement.with_changes(names=_without_last_comma(rest, statement)) if ours else statement
    if ours and not rest:
        yield statement.with_changes(module=target)
    elif ours:
        plain = statement.with_changes(lpar=None, rpar=None, module=target)
        yield plain.with_changes(names=_without_last_comma(ours))


def _without_last_comma(names: list[cst.ImportAlias], statement: cst.ImportFrom | None = None) -> list[cst.ImportAlias]:
    if statement is not None and statement.lpar is not None:
        return names
    return [*names[:-1], names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def with_standard_import(module: cst.Module, name: str) -> cst.Module:
    """Return the module with ``import name``: among the first imports of the standard library, in order, or above."""
    body = list(module.body)
    if any(("import", name) in _imported(line) for line in body):
        return module
    start = _after_head(body)
    block = list(itertools.takewhile(_imported, body[start:]))
    standard = [(start + at, _imported(line)[0]) for at, line in enumerate(block) if _is_standard(_imported(line)[0])]
    before = [at for at, (kind, other) in standard if kind == "import" and other < name]
    if before:
        return module.with_changes(body=_inserted(body, before[-1] + 1, name, own_block=False))
    at = standard[0][0] if standard else start
    return module.with_changes(body=_inserted(body, at, name, own_block=not standard))


def _imported(line: _Line) -> list[tuple[str, str]]:
    """Return ("import" or "from", module) of each module that a line imports; one with another name is "as"."""
    if not isinstance(line, cst.SimpleStatementLine):
        return []
    found = []
    for statement in line.body:
        if isinstance(statement, cst.Import):
            found += [("as" if one.asname else "import", one.evaluated_name) for one in statement.names]
        elif isinstance(statement, cst.ImportFrom):
            module = get_full_name_for_node(statement.module) if statement.module else None
            found.append(("from", "." * len(statement.relative) + (module or "")))
    return found


def _is_standard(imported: tuple[str, str]) -> bool:
    return imported[1].partition(".")[0] in sys.stdlib_module_names


def _is_future(line: _Line) -> bool:
    return ("from", "__future__") in _imported(line)


def _after_head(body: Sequence[_Line]) -> int:
    """Return the place after a docstring and imports from ``__future__``."""
    at = 0
    while at < len(body) and (_is_future(body[at]) or (at == 0 and _is_docstring(body[at]))):
        at += 1
    return at


def _is_docstring(line: _Line) -> bool:
    first = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    return isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)


def _inserted(body: list[_Line], at: int, name: str, *, own_block: bool) -> list[_Line]:
    """Return the lines with an import; it takes the empty lines before the next line if it is the first of a block."""
    line = cst.SimpleStatementLine([cst.Import([cst.ImportAlias(cst.Name(name))])])
    follows_import = at > 0 and not own_block and bool(_imported(body[at - 1])) and not _is_future(body[at - 1])
    if at < len(body) and not follows_import:
        after = body[at]
        empty = list(itertools.takewhile(lambda one: one.comment is None, after.leading_lines))
        rest = after.leading_lines[len(empty) :]
        line = line.with_changes(leading_lines=empty or ([cst.EmptyLine(indent=False)] if at else []))
        gap = (empty or [cst.EmptyLine(indent=False)]) if own_block else []
        body[at] = after.with_changes(leading_lines=[*gap, *rest])
    return [*body[:at], line, *body[at:]]
