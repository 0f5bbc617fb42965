"""Find the uses of the legacy API in a module, and the calls that treat a path as one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .findings import CHANGE, CHECK, KINDS
from .source_modules import API, LISTED, OURS, Module, argument, is_other_file, last_name, text_constant

_UTILS = "flax.training.orbax_utils"
_FLAG = "flax_use_orbax_checkpointing"
# Kind of finding → functions by their last two names, and methods of any object by their own.
_CALLS = {
    "remove": "os.remove os.unlink gfile.remove gfile.Remove io.remove .unlink .rm .rm_file",
    "copy": """shutil.copy shutil.copy2 shutil.copyfile gfile.copy gfile.Copy io.copy os.link .hardlink_to .copy_file
        .cp_file .get_file .put_file""",
    "open": """open io.open gfile.GFile gfile.Open io.GFile fsspec.open gzip.open bz2.open lzma.open codecs.open
        aiofiles.open filecmp.cmp fileinput.input numpy.fromfile numpy.load numpy.memmap os.truncate .open .read_bytes
        .cat_file""",
    "is-file": "path.isfile .is_file .isfile",
    "size": "path.getsize os.stat gfile.stat .stat",
    "upload": "huggingface_hub.upload_file .add_file .upload_file .upload_from_filename .fput_object",
    "wrapped": ".copy .delete .download .get .move .put .send .upload",
}
_KIND_OF_CALL = {name: kind for kind, names in _CALLS.items() for name in names.split()}
_FOR_FOLDERS = {"isdir", "is_dir", "IsDirectory", "rmtree", "copytree", "DeleteRecursively"}
_NO_SIZE = re.compile(r"st_(?!size)\w+|[<>=] ?0\b")  # another fact, or only whether there is anything
_TESTS = {"startswith", "endswith", "match", "fullmatch", "search", "fnmatch"}
_MODE_TO_WRITE = re.compile(r"[wax][bt+]*")
_SHELLS = re.compile(r"os\.(system|popen)|subprocess\.\w+|\.system")
_COMMANDS = re.compile(r"cp|scp|gsutil|rsync|azcopy|aws|zip|rm|unlink|cat|curl|gzip|pigz|bzip2|xz|zstd|lz4|\w+sum")
_TAKES_FOLDERS = re.compile(r"(-\w*[raR]\w*|--recursive|--archive|mv)$")


def api_name(module: Module, node: ast.AST) -> str:
    """Return the name of the legacy API that an expression stands for, or ""."""
    package, _, name = module.dotted(node).rpartition(".")
    return name if package in (API, OURS) else ""


def api_uses(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield each use, as the kind of finding and the node."""
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}" if isinstance(node, ast.ImportFrom) else ""
            found = {package, *(f"{package}.{alias.name}".strip(".") for alias in node.names)}
            kinds = {API: "import", "flax.training.*": "import", _UTILS: "api"}
            yield from ((kinds[name], node) for name in found & kinds.keys())
        elif isinstance(node, ast.Call):
            yield from _calls(module, node)
        elif _FLAG in {str(getattr(node, key, "")).lower() for key in ("attr", "arg", "value")}:
            yield "flag", node
        # In another way than an import, as ``training.checkpoints``.
        if isinstance(node, ast.Attribute | ast.Call | ast.Subscript) and module.dotted(node) == API:
            yield "import", node


def _calls(module: Module, node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = api_name(module, node.func) or api_name(module, node)  # of functools.partial
    if name or module.dotted(node.func).startswith(f"{_UTILS}."):
        yield "api", node
    # It may begin with an unknown part; an empty text is the default of an option that was not given.
    path = module.text(argument(node, "ckpt_dir", 0)) if name.startswith(("save", "restore")) else ""
    if path and not re.match(r"[/~*?%{]|\w+://", path):
        yield "relative-path", node


def file_uses(module: Module) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield each call that treats a path as one file: the kind of finding, what it asks for, and the node."""
    for node in module.calls:
        for kind, paths in _operations(module, node):
            if action := _action(module, kind, paths, node):
                yield kind, action, node
        name = last_name(node.func)
        if module.lists_checkpoints(node):
            yield "glob", CHANGE if name == "walk" else CHECK, node
        elif name == "rmtree" and any(LISTED in module.text(one) for one in node.args):
            yield "remove-folders", CHECK, node


def _operations(module: Module, node: ast.Call) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield the file operations of a call, and of functions passed to it, with the paths that they may take."""
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    name = _name(module, node.func)
    if _SHELLS.fullmatch(name):
        yield "shell", values[:1]
    elif kind := _KIND_OF_CALL.get(name):
        receiver = [node.func.value] if name.startswith(".") and isinstance(node.func, ast.Attribute) else []
        yield kind, [*receiver, *values] if receiver else values[:1]
    for one in values:
        if isinstance(one, ast.Name | ast.Attribute) and (kind := _KIND_OF_CALL.get(_name(module, one))):
            yield kind, [other for other in values if other is not one]


def _name(module: Module, function: ast.expr) -> str:
    """Return the last two names of a function, as it was imported or is written, or a method's after a dot."""
    dotted, name = module.dotted(function), last_name(function)
    if dotted or not isinstance(function, ast.Attribute):
        return ".".join(dotted.split(".")[-2:]) or name
    written = f"{last_name(function.value)}.{name}"
    return written if written in _KIND_OF_CALL or _SHELLS.fullmatch(written) else f".{name}"


def _action(module: Module, kind: str, paths: list[ast.expr], node: ast.Call) -> str | None:
    """Return whether a call has to change, or asks for a look; None if it is about another file."""
    modes = list(map(text_constant, [*node.args, *(keyword.value for keyword in node.keywords)]))
    is_writing = kind == "open" and any(map(_MODE_TO_WRITE.fullmatch, modes))
    is_fact = kind == "size" and _NO_SIZE.search(module.finding("", "", node).code)
    if is_writing or is_fact or _is_of_other_names(module, node):
        return None
    others = [one for one in paths if _names(one) not in _given_to_folder_calls(module, node)]
    texts = _words_of_command(module, others) if kind == "shell" else map(module.text, others)
    files = [text for text in texts if not is_other_file(text)]
    if any(map(module.project.names_checkpoint, files)):
        return KINDS[kind].action
    return CHECK if files and others == paths and kind != "wrapped" and (kind != "open" or "rb" in modes) else None


def _is_of_other_names(module: Module, node: ast.Call) -> bool:
    """Return whether an ``if`` around a call tests names for a text that is none of checkpoints."""
    ifs = [one for one in ast.walk(module.project.around[node]) if isinstance(one, ast.If)]
    tests = [one.test for one in ifs if any(node is part for each in one.body for part in ast.walk(each))]
    calls = [test for test in tests if last_name(getattr(test, "func", test)) in _TESTS]
    texts = filter(None, [text_constant(part) for call in calls for part in ast.walk(call)])
    may_be = [module.project.names_checkpoint(f"{one}*") or re.search("(?i)ckpt|checkpoint", one) for one in texts]
    return bool(may_be) and not any(may_be)


def _given_to_folder_calls(module: Module, node: ast.Call) -> list[list[str]]:
    """Return the expressions that code around a call gives to functions for directories."""
    around = ast.walk(module.project.around[node])
    calls = [one for one in around if isinstance(one, ast.Call) and last_name(one.func) in _FOR_FOLDERS]
    return [_names(part) for one in calls for part in (*one.args, *ast.iter_child_nodes(one.func))]


def _names(node: ast.AST) -> list[str]:
    return [last_name(one) or text_constant(one) for one in ast.walk(node)]


def _words_of_command(module: Module, commands: list[ast.expr]) -> list[str]:
    """Return the words of a shell command, if it is one that passes over directories."""
    parts = [one for each in commands for one in getattr(each, "elts", [each])]
    words = re.findall(r"""[^\s'";&|<>]+""", " ".join(map(module.text, parts)))
    return words if any(map(_COMMANDS.fullmatch, words)) and not any(map(_TAKES_FOLDERS.match, words)) else []
