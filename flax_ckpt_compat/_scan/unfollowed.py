"""Find where a scan loses sight: calls of code that was not scanned, and file operations on unknown paths."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator

from .evaluation import Evaluation
from .file_uses import METHODS, FileUses
from .library import API
from .modules import Module
from .names import last_name
from .values import CHECKPOINT, ENTRY, LIBRARY, RUN, texts

_FILE_WORDS = {"archive", "backup", "checksum", "compress", "copy", "cp", "delete", "download", "fetch", "get", "hash"}
_FILE_WORDS |= {
    "link",
    "load",
    "move",
    "mv",
    "open",
    "publish",
    "push",
    "put",
    "read",
    "remove",
    "rename",
    "rm",
    "send",
}
_FILE_WORDS |= {"size", "stat", "sync", "unlink", "upload", "zip"}
_TOLD = {"critical", "debug", "error", "exception", "info", "log", "print", "warn", "warning", "write", "echo", "secho"}
_BUILTIN = set(dir(builtins))
_METHODS = {name for kind in (str, list, dict, set, bytes) for name in dir(kind)}
_HAVE_QUEUES = {"asyncio", "multiprocessing", "queue"}
_OPERATIONS = set().union(*METHODS.values())
_ASKED = {"remove", "copy", "is-file", "upload"}  # operations that are told of where nothing is known of the path


def unfollowed(evaluation: Evaluation, module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Give the calls with which a scan cannot go on: ``wrapped`` file operations, or others (``call``, ``path``)."""
    uses = FileUses(evaluation, module)
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        kind = uses.kind_of(node.func)
        if kind in _ASKED and values and _is_unknown(evaluation, module, values[0]):
            yield "path", node
            continue
        is_told = kind is not None or last_name(node.func) in _OPERATIONS or _is_known(evaluation, module, node)
        if not is_told and any(_is_passed(evaluation, module, value) for value in values):
            yield ("wrapped" if _FILE_WORDS & _words(last_name(node.func)) else "call"), node


def _words(name: str) -> set[str]:
    """Return the words of a name such as ``copy_file`` or ``copyFile``, in lower case."""
    return {word.lower() for word in re.findall(r"[a-z0-9]+|[A-Z][a-z0-9]*", name)}


def _is_passed(evaluation: Evaluation, module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant | ast.JoinedStr) and not any(
        tag.kind == CHECKPOINT for tag in evaluation.value(module, node)
    ):
        return False
    return evaluation.holds(module, node)


def _is_known(evaluation: Evaluation, module: Module, node: ast.Call) -> bool:
    """Return whether it is known what a called function does: the project's, the standard library's, the API's."""
    if any(True for _ in evaluation.functions(module, node.func)):
        return True
    if any(tag.kind == LIBRARY and not tag.place for tag in evaluation.value(module, node.func)):
        return True
    dotted, name = evaluation.dotted(module, node.func), last_name(node.func)
    if dotted is None and name in {"put", "put_nowait"}:  # of a queue, or of a store
        return any(one.partition(".")[0] in _HAVE_QUEUES for one in module.names.all())
    if dotted is None and isinstance(node.func, ast.Attribute):
        return name in _METHODS | _TOLD or evaluation.value(module, node.func.value) != frozenset()
    top = (dotted or name).partition(".")[0]
    return (
        (dotted or "").startswith((f"{API}.", "flax.", "flax_ckpt_compat."))
        or top in sys.stdlib_module_names
        or (dotted is None and name in _BUILTIN)
        or name in _TOLD
        or ".gfile." in f".{dotted}"
        or name in {"Path", "join", "exists", "isdir", "safe_normpath"}
    )


def _is_unknown(evaluation: Evaluation, module: Module, node: ast.expr) -> bool:
    """Return whether nothing is known of a path: neither where it comes from, nor how it ends."""
    value = evaluation.value(module, node)
    listings = evaluation.listings.by_id
    listed = [listings[int(tag.of)] for tag in value if tag.kind == ENTRY]
    if listed:
        return not all(one.of_known for one in listed)
    is_told_apart = any(tag.kind == ENTRY for tag in evaluation.before_tests(module, node))
    if is_told_apart or any(tag.kind in (CHECKPOINT, LIBRARY, RUN) for tag in value if not tag.place):
        return False
    return all(map(evaluation.names.may_be, texts(value)))
