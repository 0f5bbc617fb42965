"""Find in one module the uses of the legacy API, and the code that expects a checkpoint to be one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoint_paths import CheckpointPaths
from .names import CHECKPOINT_API, Names, last_name

_API = "flax.training.checkpoints"
_UTILS = "flax.training.orbax_utils"
_FLAG = "flax_use_orbax_checkpointing"
# Where the prefix stands among the arguments.
_PREFIX_ARGUMENT = {"save_checkpoint": 3, "save_checkpoint_multiprocess": 3, "restore_checkpoint": 3}
_PREFIX_ARGUMENT["latest_checkpoint"] = 1
# Calls that expect a file, by the last names of the function, and methods of paths that do.
_CALLS = {
    "remove": {"os.remove", "os.unlink", "gfile.remove", "gfile.Remove", "io.remove"},
    "copy": {"shutil.copy", "shutil.copy2", "shutil.copyfile", "gfile.copy", "gfile.Copy", "io.copy"},
    "open": {"open", "io.open", "gfile.GFile", "gfile.Open", "io.GFile", "epath.open", "fsspec.open", "gzip.open"},
    "is-file": {"path.isfile"},
    "size": {"path.getsize"},
    "glob": {"glob.glob", "glob.iglob", "gfile.glob", "gfile.Glob", "io.glob"},
}
_METHODS = {
    "remove": {"unlink"},
    "open": {"open", "read_bytes"},
    "is-file": {"is_file"},
    "size": {"stat"},
    "upload": {"add_file", "upload_file", "upload_from_filename", "fput_object"},
    "glob": {"glob", "rglob", "iglob"},
}
_LISTERS = {"listdir", "iterdir", "ListDirectory", "scandir"}
_PARSERS = {"split", "rsplit", "partition", "rpartition", "removeprefix"}
_SHELL = {"os.system", *(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen"))}
_COPIES = re.compile(r"\b(cp|scp|gsutil|rsync|mv)\b")
_RECURSIVE = re.compile(r"(^|\s)(-\w*[raR]\w*|--recursive|--archive)\b")


@dataclass(frozen=True)
class Use:
    """A finding in a module."""

    kind: str
    line: int  # Line of the code, from 1
    column: int  # Column in bytes of UTF-8, from 0, as `ast` counts


def scan_module(tree: ast.Module, *, in_project: bool) -> list[Use]:
    """Return what a module does with checkpoints, in its order.

    If another module ``in_project`` uses the legacy API, names like ``checkpoint_{step}`` are its checkpoints, too."""
    names = Names(tree)
    uses = {(found.lineno, found.col_offset, kind) for kind, found in _api_uses(tree, names)}
    uses_api = any(kind != "flag" for _, _, kind in uses)
    if uses_api or (in_project and not _is_torch(tree)):
        paths = CheckpointPaths(tree, names, _prefixes(tree, names), uses_api=uses_api)
        uses |= {(found.lineno, found.col_offset, kind) for kind, found in _path_uses(tree, names, paths)}
    return [Use(kind, line, column) for line, column, kind in sorted(uses)]


def uses_legacy_api(tree: ast.Module) -> bool:
    """Return whether a module uses `flax.training.checkpoints`."""
    return any(kind != "flag" for kind, _ in _api_uses(tree, Names(tree)))


Found = Iterator[tuple[str, ast.expr | ast.stmt | ast.ExceptHandler]]


def _api_uses(tree: ast.Module, names: Names) -> Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.Call):
            yield from _api_calls(node, names)
        elif isinstance(node, ast.If) and _is_guard(node.test):
            yield from (("process-guard", call) for call in _calls_in(node.body, names, "save_checkpoint"))
        elif isinstance(node, ast.Try) and any(_calls_in(node.body, names, "restore_checkpoint")):
            yield from (("caught-error", handler) for handler in node.handlers)
        elif isinstance(node, ast.keyword) and node.arg == _FLAG:
            yield "flag", node.value
        elif isinstance(node, ast.Attribute | ast.Constant) and _FLAG in (
            getattr(node, "attr", None),
            str(getattr(node, "value", "")).lower(),
        ):
            yield "flag", node


def _imports(node: ast.Import | ast.ImportFrom) -> Found:
    if isinstance(node, ast.Import):
        found = {alias.name for alias in node.names}
    else:
        found = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    if _API in found:
        yield "import", node
    if _UTILS in found:
        yield "orbax-utils", node


def _api_calls(node: ast.Call, names: Names) -> Found:
    dotted = names.of(node.func) or ""
    if dotted.startswith(f"{_UTILS}."):
        yield "orbax-utils", node
    name = dotted.removeprefix(f"{_API}.")
    is_import = last_name(node.func) in {"import_module", "__import__"}
    if is_import and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == _API:
        yield "import", node
    if dotted == "functools.partial" and node.args:
        name = (names.of(node.args[0]) or "").removeprefix(f"{_API}.")
    if not dotted.startswith(f"{_API}.") and name not in CHECKPOINT_API:
        return
    yield CHECKPOINT_API.get(name, "other-api"), node
    if name.startswith("save") and _is_relative(_argument(node, "ckpt_dir", 0)):
        yield "relative-path", node
    if name == "restore_checkpoint":
        target = _argument(node, "target", 1)
        if isinstance(target, ast.Constant) and target.value is None:
            yield "untyped-restore", node
        if _argument(node, "orbax_transforms", 99) is not None:
            yield "transforms", node


def _path_uses(tree: ast.Module, names: Names, paths: CheckpointPaths) -> Found:
    guarded = set(_calls_on_files(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from ((kind, node) for kind in _file_calls(node, names, paths) if (kind, node) not in guarded)
        elif isinstance(node, ast.While) and _polls(node, paths):
            yield "poll", node
        elif isinstance(node, ast.ListComp | ast.GeneratorExp) and _lists_directory(node, paths):
            yield "glob", node


def _file_calls(node: ast.Call, names: Names, paths: CheckpointPaths) -> Iterator[str]:
    """Return the kinds of file operation that a call performs on a checkpoint."""
    dotted = names.of(node.func) or ast.unparse(node.func)
    tail = ".".join(dotted.split(".")[-2:])
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    held, writes = any(map(paths.holds, values)), any(map(_is_mode_to_write, values))
    if held and not writes:
        yield from (kind for kind, calls in _CALLS.items() if tail in calls)
    if isinstance(node.func, ast.Attribute):
        of_path = paths.holds(node.func.value)
        kind = next((kind for kind, methods in _METHODS.items() if node.func.attr in methods), None)
        is_used = (held if kind in {"upload", "glob"} else of_path) and not writes
        if kind and is_used and tail not in _CALLS.get(kind, ()):
            yield kind
    converts = dotted in {"int", "float"}
    parses = converts and any(_parses(part, paths) for value in values for part in ast.walk(value))
    if parses or (held and (converts or dotted.startswith("re."))):
        yield "parse-name"
    if dotted in _SHELL and held | any(_mentions(value, paths) for value in values):
        words = " ".join(str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))
        if _COPIES.search(words) and not _RECURSIVE.search(words):
            yield "shell-copy"


def _calls_on_files(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls, as removals or copies, that are made only where ``os.path.isdir`` said no, as in fixed code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            branches = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            first = node.test.values[0] if isinstance(node.test, ast.BoolOp) else node.test
            if isinstance(first, ast.Call) and last_name(first.func) in {"isdir", "is_dir"}:
                calls = [part for branch in branches for part in ast.walk(branch) if isinstance(part, ast.Call)]
                yield from ((kind, call) for call in calls for kind in ("remove", "copy"))


def _is_mode_to_write(node: ast.expr) -> bool:
    """Return whether an argument opens a file to write it: then it is not a checkpoint of the legacy API."""
    mode = node.value if isinstance(node, ast.Constant) else None
    return isinstance(mode, str) and bool(re.fullmatch(r"[wax][bt+]*", mode))


def _parses(node: ast.AST, paths: CheckpointPaths) -> bool:
    """Return whether an expression splits or cuts a checkpoint's name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARSERS:
        return paths.holds(node.func.value)
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and paths.holds(node.value)


def _polls(node: ast.While, paths: CheckpointPaths) -> bool:
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    asked = [call for call in calls if last_name(call.func) in {"exists", "Exists", "isfile", "is_file"}]
    values = [value for call in asked for value in (*call.args, getattr(call.func, "value", None))]
    return any(map(paths.holds, values)) and any(last_name(call.func) == "sleep" for call in calls)


def _lists_directory(node: ast.ListComp | ast.GeneratorExp, paths: CheckpointPaths) -> bool:
    calls = [part.iter for part in node.generators if isinstance(part.iter, ast.Call)]
    return any(last_name(call.func) in _LISTERS for call in calls) and paths.holds(node)


def _mentions(node: ast.AST, paths: CheckpointPaths) -> bool:
    return any(paths.holds(part) for part in ast.walk(node) if isinstance(part, ast.expr))


def _is_guard(test: ast.expr) -> bool:
    """Return whether a condition asks for the number of this process."""
    calls = {last_name(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)}
    return bool(calls & {"process_index", "host_id"})


def _calls_in(body: list[ast.stmt], names: Names, function: str) -> Iterator[ast.Call]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and names.of(node.func) == f"{_API}.{function}":
                yield node


def _prefixes(tree: ast.Module, names: Names) -> set[str]:
    """Return what the names of the module's checkpoints begin with: the default, and constants given to the API."""
    found = {"checkpoint_"}
    for node in ast.walk(tree):
        name = (names.of(node.func) or "").removeprefix(f"{_API}.") if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in _PREFIX_ARGUMENT:
            given = _argument(node, "prefix", _PREFIX_ARGUMENT[name])
            if isinstance(given, ast.Constant) and isinstance(given.value, str) and len(given.value) > 2:
                found.add(given.value)
    return found


def _argument(node: ast.Call, name: str, position: int) -> ast.expr | None:
    given = [keyword.value for keyword in node.keywords if keyword.arg == name]
    return given[0] if given else node.args[position] if position < len(node.args) else None


def _is_relative(node: ast.expr | None) -> bool:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0] if isinstance(node.values[0], ast.Constant) else None
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and not re.match(r"/|~|\w+://", node.value)  # type: ignore[union-attr]


def _is_torch(tree: ast.Module) -> bool:
    """Return whether a module imports another framework whose files have such names, too."""
    tops = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return bool(tops & {"torch", "pytorch_lightning", "lightning", "keras"})
