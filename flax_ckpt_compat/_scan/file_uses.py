"""List the calls of a module that treat a path as one file."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from .findings import CHECK, KINDS
from .module import Module, is_function, last_name

# Functions by their last two names, and methods by their last, with the kind of finding.
_FUNCTIONS = {
    "remove": "os.remove os.unlink gfile.remove gfile.Remove io.remove",
    "copy": "shutil.copy shutil.copy2 shutil.copyfile gfile.copy gfile.Copy io.copy os.link",
    "open": """open io.open gfile.GFile gfile.Open io.GFile fsspec.open gzip.open bz2.open lzma.open codecs.open
        aiofiles.open filecmp.cmp fileinput.input np.fromfile np.load np.memmap numpy.fromfile numpy.load numpy.memmap
        os.truncate""",
    "is-file": "path.isfile",
    "size": "path.getsize os.stat gfile.stat",
    "upload": "huggingface_hub.upload_file",
}
_METHODS = {
    "remove": "unlink rm rm_file",
    "copy": "hardlink_to copy_file cp_file get_file put_file",
    "open": "open read_bytes cat_file",
    "is-file": "is_file isfile",
    "size": "stat",
    "upload": "add_file upload_file upload_from_filename fput_object",
    "wrapped": "copy delete download get move put send upload",
}
_FUNCTION_KINDS = {name: kind for kind, names in _FUNCTIONS.items() for name in names.split()}
_METHOD_KINDS = {name: kind for kind, names in _METHODS.items() for name in names.split()}
_LISTINGS = {"listdir", "scandir", "iterdir", "walk", "ListDirectory"}
_GLOBS = {"glob", "iglob", "rglob", "Glob"}
_TESTS = {"startswith", "endswith", "match", "fullmatch", "search", "fnmatch", "fnmatchcase", "filter", "findall"}
_IS_FOLDER = {"isdir", "is_dir", "IsDirectory"}
_IS_FILE = {"isfile", "is_file"}
_FOR_FOLDERS = {"rmtree", "copytree", "DeleteRecursively"}
_OF_CHECKPOINTS = {"save_checkpoint", "save_checkpoint_multiprocess", "latest_checkpoint"}
_PATH_NAME = re.compile(r"(^|_)(ckpt|checkpoint)(_?(path|file|filename|filepath|fname|name))?$", re.IGNORECASE)
_EXTENSION = re.compile(r"\.(?!bak$|old$|orig$|tmp$)[A-Za-z][\w-]*$")
_MODE_TO_WRITE = re.compile(r"[wax][bt+]*")
_SHELLS = re.compile(r"os\.(system|popen)|subprocess\.\w+|get_ipython\(\)\.system")
_COMMANDS = re.compile(r"cp|scp|gsutil|rsync|azcopy|aws|zip|rm|unlink|cat|curl|gzip|pigz|bzip2|xz|zstd|lz4|\w+sum")
_TAKES_FOLDERS = re.compile(r"(-\w*[raR]\w*|--recursive|--archive|mv)$")
_DEEPEST = 4  # names of names that are followed
_SHORTEST = 3  # letters that say what a name is


class FileUses:
    """The calls of one module that treat a path as one file; ``prefixes`` begin the names of checkpoints."""

    def __init__(self, module: Module, prefixes: Collection[str]) -> None:
        self._module, self._index, self._prefixes = module, module.index, prefixes
        self._calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        self._listings = {id(node) for node in self._calls if self._lists_checkpoints(node)}

    def found(self) -> Iterator[tuple[str, str, ast.AST]]:
        """Yield each call, as the kind of finding, what it asks for and the node."""
        for node in self._calls:
            for kind, paths in self._operations(node):
                if action := self._action(kind, paths, node):
                    yield kind, action, node
            if id(node) in self._listings:
                kind = "file-names" if last_name(node.func) == "walk" else "glob"
                yield kind, KINDS[kind].action, node
            elif self._parses(node):
                yield "parse-name", CHECK, node
            elif last_name(node.func) == "rmtree" and self._is_of_listing(node):
                yield "remove-folders", CHECK, node
        for loop in self._module.nodes:
            if isinstance(loop, ast.While) and "sleep" in (names := _called(loop)) and names & {"exists", *_IS_FILE}:
                yield "poll", CHECK, loop

    def _operations(self, node: ast.Call) -> Iterator[tuple[str, list[ast.expr]]]:
        """Yield the file operations of a call, and of functions passed to it, with the paths that they may take."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        written = self._module.dotted(node.func) or ast.unparse(node.func)
        if kind := self._kind(node.func):
            yield kind, values[: 2 if written == "filecmp.cmp" else 1]
        elif _SHELLS.fullmatch(written) and node.args and (words := self._words_for_files(node.args[0])):
            parts = [part for part in ast.walk(node.args[0]) if isinstance(part, ast.Name | ast.Attribute | ast.Call)]
            yield "shell", [*map(ast.Constant, words), *parts]
        elif isinstance(node.func, ast.Attribute) and not self._module.dotted(node.func):
            method = _METHOD_KINDS.get(node.func.attr)
            if method:
                yield (
                    method,
                    [node.func.value, *values] if method in {"remove", "wrapped"} else values or [node.func.value],
                )
        for one in values:
            if isinstance(one, ast.Name | ast.Attribute) and (passed := self._kind(one)):
                yield passed, [other for other in values if other is not one]

    def _kind(self, function: ast.expr) -> str | None:
        written = isinstance(function, ast.Name | ast.Attribute) and ast.unparse(function)
        name = self._module.dotted(function) or written or ""
        return _FUNCTION_KINDS.get(".".join(name.split(".")[-2:]))

    def _action(self, kind: str, paths: list[ast.expr], node: ast.Call) -> str | None:
        """Return whether a call has to change, or asks for a look; None if it is about another file."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        modes = [one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if self._is_spared(node) or (kind == "size" and not self._asks_size(node)):
            return None
        if kind == "open" and any(map(_MODE_TO_WRITE.fullmatch, modes)):
            return None
        said = [self._is_checkpoint(path) for path in paths]
        if True in said:
            return KINDS[kind].action
        is_likely = kind != "wrapped" and (kind != "open" or "rb" in modes)
        return CHECK if None in said and is_likely else None

    def _is_checkpoint(self, node: ast.AST, depth: int = 0) -> bool | None:
        """Return whether an expression is the path of a checkpoint; None if nothing says so."""
        name = self._module.text(node).rpartition("/")[2]
        if _EXTENSION.search(name):
            return False
        if name.startswith(tuple(self._prefixes)):
            return True
        if (_letters(name) >= _SHORTEST and " " not in name) or depth > _DEEPEST:
            return None
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute | ast.Call)]
        is_one = any(
            id(part) in self._listings
            or (isinstance(part, ast.Call) and self._name(part.func) in _OF_CHECKPOINTS)
            or _PATH_NAME.search(last_name(part))
            or any(self._is_checkpoint(value, depth + 1) for value in self._index.values(part))
            for part in parts
        )
        return True if is_one else None

    def _name(self, function: ast.expr) -> str:
        return (self._module.dotted(function) or last_name(function)).rpartition(".")[2]

    def _is_of_listing(self, node: ast.AST, depth: int = 0) -> bool:
        """Return whether a call is about all that a listing gives."""
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Call | ast.Name | ast.Attribute)]
        values = [value for part in parts for value in self._index.values(part)] if depth < _DEEPEST else []
        return bool(_called(node) & _LISTINGS) or any(self._is_of_listing(value, depth + 1) for value in values)

    def _may_be(self, pattern: str) -> bool:
        """Return whether a pattern, part or regular expression fits names such as ``checkpoint_1``."""
        if _letters(pattern) < _SHORTEST:
            return False
        names = [f"{prefix}1" for prefix in self._prefixes]
        if any(fnmatchcase(name, pattern) or pattern in name or pattern.startswith(name[:-1]) for name in names):
            return True
        try:
            return any(re.search(pattern, name) for name in names)
        except (re.error, OverflowError):
            return False

    def _lists_checkpoints(self, node: ast.Call) -> bool:
        """Return whether a call lists names by a pattern of checkpoints, or code around it tests names for them."""
        name = last_name(node.func)
        pattern = self._module.text(node.args[-1]).rpartition("/")[2] if name in _GLOBS and node.args else "*"
        if self._may_be(pattern):
            return True
        if name not in _LISTINGS | _GLOBS or pattern.strip("*"):
            return False
        around = list(self._index.above(node))
        scope = next((one for one in around if is_function(one)), None)
        scope = scope or next(one for one in around if isinstance(one, ast.stmt))
        return any(self._may_be(text) for part in ast.walk(scope) for text in self._texts_of_test(part))

    def _texts_of_test(self, node: ast.AST) -> list[str]:
        """Return the texts that names are compared with, if a node does so."""
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and last_name(node.func) in _TESTS:
            values = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        elif isinstance(node, ast.Compare) and last_name(node.left) != "__name__":
            is_test = isinstance(node.ops[0], ast.Eq | ast.In | ast.NotEq | ast.NotIn)
            values = [node.left, *node.comparators] if is_test else []
        parts = [part for one in values for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        parts += [value for part in parts for value in self._index.values(part)]
        parts += [part.args[0] for part in parts if isinstance(part, ast.Call) and part.args]  # of re.compile
        return [text for one in parts if (text := self._module.text(one)).strip("*")]

    def _is_spared(self, node: ast.AST) -> bool:
        """Return whether tests around a call exclude directories or checkpoints, or directories have their own call."""
        for test, is_true in self._guards(node):
            if isinstance(test, ast.UnaryOp):
                test, is_true = test.operand, not is_true
            for one in test.values if isinstance(test, ast.BoolOp) else [test]:
                asked, texts = _called(one), self._texts_of_test(one)
                if asked & _IS_FOLDER and not is_true:
                    return True
                is_asked = is_true is not (
                    isinstance(one, ast.Compare) and isinstance(one.ops[0], ast.NotEq | ast.NotIn)
                )
                is_of_one = isinstance(one, ast.Compare) and isinstance(one.ops[0], ast.Eq | ast.NotEq)
                if texts and any(map(self._may_be, texts)) is not is_asked and (is_asked or not is_of_one):
                    return True
        around = [one for one in self._index.above(node) if isinstance(one, ast.If | ast.IfExp | ast.Try)]
        by_kind = (one for one in around if isinstance(one, ast.Try) or _called(one.test) & (_IS_FOLDER | _IS_FILE))
        return any(_FOR_FOLDERS & {last_name(part) for part in ast.walk(one)} for one in by_kind)

    def _guards(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """Yield the tests whose result is known at a node: those around it, and those before that would have left."""
        child = node
        for parent in self._index.above(node):
            if isinstance(parent, ast.If | ast.While | ast.IfExp) and child is not parent.test:
                yield (
                    parent.test,
                    child is parent.body or child in (parent.body if isinstance(parent.body, list) else ()),
                )
            elif isinstance(parent, ast.ListComp | ast.SetComp | ast.GeneratorExp) and child is parent.elt:
                yield from ((test, True) for one in parent.generators for test in one.ifs)
            block = getattr(parent, "body", None)
            for before in block[: block.index(child)] if isinstance(block, list) and child in block else []:
                if isinstance(before, ast.If) and isinstance(before.body[-1], ast.Continue | ast.Return | ast.Raise):
                    yield before.test, False
            child = parent

    def _asks_size(self, node: ast.Call) -> bool:
        """Return whether the size is used, and not only compared with 0."""
        around = [one for one in self._index.above(node) if not isinstance(one, ast.Attribute)]
        numbers = around[0].comparators if isinstance(around[0], ast.Compare) else []
        attributes = {one.attr for one in self._module.nodes if isinstance(one, ast.Attribute)}
        is_size = last_name(node.func) != "stat" or attributes & {"st_size", "length"}
        return bool(is_size) and not any(isinstance(one, ast.Constant) and one.value == 0 for one in numbers)

    def _parses(self, node: ast.Call) -> bool:
        """Return whether a call makes a number of a part of a name, or takes a name apart by a regular expression."""
        if last_name(node.func) in _TESTS:
            return any("(" in text and self._may_be(text) for text in self._texts_of_test(node))
        if last_name(node.func) not in {"int", "float"} or not node.args:
            return False
        parts = list(ast.walk(node.args[0]))
        texts = {part.value for part in parts if isinstance(part, ast.Constant)}
        return bool(texts & {"_", *self._prefixes}) and any(map(self._is_checkpoint, parts))

    def _words_for_files(self, command: ast.expr) -> list[str]:
        """Return the words of a shell command, if it is one that passes over directories."""
        parts = command.elts if isinstance(command, ast.List | ast.Tuple) else [command]
        text = " ".join(map(self._module.text, parts))
        try:
            words = shlex.split(re.sub(r"(;|&&|\||>)", r" \1 ", text))
        except ValueError:
            words = text.split()
        is_one = any(map(_COMMANDS.fullmatch, words)) and not any(map(_TAKES_FOLDERS.match, words))
        return words if is_one else []


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def _called(node: ast.AST) -> set[str]:
    return {last_name(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
