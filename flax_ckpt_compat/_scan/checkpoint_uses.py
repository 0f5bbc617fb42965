"""Find the uses of the legacy API in a module, and the calls that treat a path as one file."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from .findings import CHECK, KINDS
from .source_modules import API, OURS, Module, argument, last_name, text_constant

_UTILS = "flax.training.orbax_utils"
_FLAG = "flax_use_orbax_checkpointing"
_NAMES = {
    *("save_checkpoint", "save_checkpoint_multiprocess", "restore_checkpoint", "latest_checkpoint", "available_steps"),
    *("AsyncManager", "convert_pre_linen", "natural_sort", "safe_normpath"),
}

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
_LEAVES = ast.Continue | ast.Return | ast.Raise
_FOR_FOLDERS = {"rmtree", "copytree", "DeleteRecursively"}
_OF_CHECKPOINTS = {"save_checkpoint", "save_checkpoint_multiprocess", "latest_checkpoint"}
_PATH_NAME = re.compile(r"(^|_)(ckpt|checkpoint)(_?(path|file|filename|filepath|fname|name))?$", re.IGNORECASE)
_EXTENSION = re.compile(r"\.(?!bak$|old$|orig$|tmp$)[A-Za-z][\w-]*$")
_MODE_TO_WRITE = re.compile(r"[wax][bt+]*")
_SHELLS = re.compile(r"os\.(system|popen)|subprocess\.\w+|get_ipython\(\)\.system")
_COMMANDS = re.compile(r"cp|scp|gsutil|rsync|azcopy|aws|zip|rm|unlink|cat|curl|gzip|pigz|bzip2|xz|zstd|lz4|\w+sum")
_TAKES_FOLDERS = re.compile(r"(-\w*[raR]\w*|--recursive|--archive|mv)$")
_SHORTEST = 3  # letters that say what a name is

Found = Iterator[tuple[str, ast.AST]]


def api_name(module: Module, node: ast.AST) -> str:
    """Return the name of the legacy API that an expression stands for, or ""."""
    dotted = module.dotted(node)
    name = dotted.removeprefix(f"{API}.")
    is_of_wildcard = bool(module.wildcards) and isinstance(node, ast.Name) and name not in _NAMES
    return name if dotted != name and "." not in name and not is_of_wildcard else ""


def api_uses(module: Module) -> Found:
    """Yield each use, as the kind of finding and the node."""
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.Call):
            yield from _calls(module, node)
        elif isinstance(node, ast.keyword) and node.arg == _FLAG:
            yield "flag", node.value
        elif str(getattr(node, "attr", getattr(node, "value", ""))).lower() == _FLAG:
            yield "flag", node
        if isinstance(node, ast.expr) and _gets_module(module, node):
            yield "import", node


def _imports(node: ast.Import | ast.ImportFrom) -> Found:
    found = {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        found = {node.module or "", *(f"{node.module}.{name}" for name in found)}
    yield from ((kind, node) for name, kind in ((API, "import"), (_UTILS, "api")) if name in found)


def _gets_module(module: Module, node: ast.expr) -> bool:
    """Return whether an expression gets Flax's module in another way than an import, as ``training.checkpoints``."""
    if isinstance(node, ast.Name):
        is_bound = node.id in module.imported or bool(module.values(node)) or isinstance(node.ctx, ast.Store)
        return not is_bound and module.dotted(node) == API
    is_one = isinstance(node, ast.Attribute | ast.Call | ast.Subscript)
    return is_one and module.dotted(node) == API and ast.unparse(node) not in (API, OURS)


def _calls(module: Module, node: ast.Call) -> Found:
    is_partial = module.dotted(node.func) == "functools.partial" and node.args
    name = api_name(module, node.args[0] if is_partial else node.func)
    if name or module.dotted(node.func).startswith(f"{_UTILS}."):
        yield "api", node
    # Nobody knows what stands before an unknown part; an empty text is the default of an option that was not given.
    path = module.text(argument(node, "ckpt_dir", 0)) if name.startswith(("save", "restore")) else ""
    if path and not re.match(r"/|~|\*|\w+://", path):
        yield "relative-path", node


class FileUses:
    """The calls of one module that treat a path as one file; ``prefixes`` begin the names of checkpoints."""

    def __init__(self, module: Module, prefixes: Collection[str]) -> None:
        self._module, self._prefixes = module, tuple(prefixes)
        self._calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        self._listings = {node for node in self._calls if self._lists_checkpoints(node)}

    def found(self) -> Iterator[tuple[str, str, ast.AST]]:
        """Yield each call, as the kind of finding, what it asks for and the node."""
        for node in self._calls:
            name = last_name(node.func)
            for kind, paths in self._operations(node):
                if action := self._action(kind, paths, node):
                    yield kind, action, node
            if node in self._listings:
                kind = "file-names" if name == "walk" else "glob"
                yield kind, KINDS[kind].action, node
            elif self._parses(node):
                yield "parse-name", CHECK, node
            elif name == "rmtree" and self._is_of_listing(node):
                yield "remove-folders", CHECK, node
        for loop in self._module.nodes:
            if isinstance(loop, ast.While) and "sleep" in (names := _called(loop)) and names & {"exists", *_IS_FILE}:
                yield "poll", CHECK, loop

    def _operations(self, node: ast.Call) -> Iterator[tuple[str, list[ast.expr]]]:
        """Yield the file operations of a call, and of functions passed to it, with the paths that they may take."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        dotted = self._module.dotted(node.func)
        if kind := self._kind(node.func):
            yield kind, values[: 2 if dotted == "filecmp.cmp" else 1]
        elif _SHELLS.fullmatch(dotted or ast.unparse(node.func)) and node.args:
            yield "shell", self._files_of_command(node.args[0])
        elif isinstance(node.func, ast.Attribute) and not dotted and (method := _METHOD_KINDS.get(node.func.attr)):
            yield method, [node.func.value, *values]
        for one in values:
            if isinstance(one, ast.Name | ast.Attribute) and (passed := self._kind(one)):
                yield passed, [other for other in values if other is not one]

    def _kind(self, function: ast.expr) -> str | None:
        written = ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""
        return _FUNCTION_KINDS.get(".".join((self._module.dotted(function) or written).split(".")[-2:]))

    def _files_of_command(self, command: ast.expr) -> list[ast.expr]:
        """Return the words and names in a shell command, if it is one that passes over directories."""
        parts = command.elts if isinstance(command, ast.List | ast.Tuple) else [command]
        text = " ".join(map(self._module.text, parts))
        try:
            words = shlex.split(re.sub(r"(;|&&|\||>)", r" \1 ", text))
        except ValueError:
            words = text.split()
        if not any(map(_COMMANDS.fullmatch, words)) or any(map(_TAKES_FOLDERS.match, words)):
            return []
        return [*map(ast.Constant, words), *_names_in(command)]

    def _action(self, kind: str, paths: list[ast.expr], node: ast.Call) -> str | None:
        """Return whether a call has to change, or asks for a look; None if it is about another file."""
        modes = [getattr(one, "value", "") for one in [*node.args, *(keyword.value for keyword in node.keywords)]]
        is_writing = any(isinstance(mode, str) and _MODE_TO_WRITE.fullmatch(mode) for mode in modes)
        if self._is_spared(node) or (kind == "open" and is_writing) or (kind == "size" and not self._asks_size(node)):
            return None
        said = [self._is_checkpoint(path) for path in paths]
        if True in said:
            return KINDS[kind].action
        is_likely = kind != "wrapped" and (kind != "open" or "rb" in modes)
        return CHECK if None in said and is_likely else None

    def _asks_size(self, node: ast.Call) -> bool:
        """Return whether the size is used, and not only compared with 0."""
        around = next(one for one in self._module.above(node) if not isinstance(one, ast.Attribute))
        numbers = [getattr(one, "value", None) for one in getattr(around, "comparators", [])]
        attributes = {getattr(one, "attr", "") for one in self._module.nodes}
        return 0 not in numbers and (last_name(node.func) != "stat" or bool(attributes & {"st_size", "length"}))

    def _is_checkpoint(self, node: ast.AST) -> bool | None:
        """Return whether an expression is the path of a checkpoint; None if nothing says so."""
        if _EXTENSION.search(self._name(node)):
            return False
        for one in self._origins(node):
            if self._is_named(one):
                is_one = self._name(one).startswith(self._prefixes) and not _EXTENSION.search(self._name(one))
            else:
                is_one = any(map(self._is_of_checkpoints, _names_in(one)))
            if is_one:
                return True
        return None

    def _is_of_checkpoints(self, node: ast.expr) -> bool:
        """Return whether a name is one of checkpoints, or a call gives their paths."""
        called = self._module.dotted(node.func) or last_name(node.func) if isinstance(node, ast.Call) else ""
        is_of_api = called.rpartition(".")[2] in _OF_CHECKPOINTS
        return is_of_api or node in self._listings or bool(_PATH_NAME.search(last_name(node)))

    def _is_of_listing(self, node: ast.AST) -> bool:
        """Return whether a call is about all that a listing gives."""
        return any(_called(one) & _LISTINGS for one in self._origins(node))

    def _origins(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield an expression and those that its names may be, each once; what has a name is not followed."""
        found, seen = [node], {node}
        for one in found:
            yield one
            for part in [] if self._is_named(one) else _names_in(one):
                new = [value for value in self._module.values(part) if value not in seen]
                found += new
                seen.update(new)

    def _name(self, node: ast.AST) -> str:
        return self._module.text(node).rpartition("/")[2]

    def _is_named(self, node: ast.AST) -> bool:
        name = self._name(node)
        return bool(_EXTENSION.search(name)) or (_letters(name) >= _SHORTEST and " " not in name)

    def _may_be(self, pattern: str) -> bool:
        """Return whether a pattern, part or regular expression fits names such as ``checkpoint_1``."""
        names = [f"{prefix}1" for prefix in self._prefixes] if _letters(pattern) >= _SHORTEST else []
        if any(fnmatchcase(name, pattern) or pattern in name or pattern.startswith(name[:-1]) for name in names):
            return True
        try:
            return any(re.search(pattern, name) for name in names)
        except (re.error, OverflowError):
            return False

    def _lists_checkpoints(self, node: ast.Call) -> bool:
        """Return whether a call lists names by a pattern of checkpoints, or code around it tests names for them."""
        name = last_name(node.func)
        if name in _GLOBS and node.args:
            pattern = self._module.text(node.args[-1]).rpartition("/")[2]
            if pattern.strip("*"):
                return self._may_be(pattern)
        elif name not in _LISTINGS:
            return False
        around = [one for one in self._module.above(node) if isinstance(one, ast.stmt)]
        functions = [one for one in around if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        nodes = ast.walk((functions or around)[0])
        return any(self._may_be(text) for part in nodes for text in self._texts_of_test(part))

    def _parses(self, node: ast.Call) -> bool:
        """Return whether a call makes a number of a part of a name, or takes a name apart by a regular expression."""
        if last_name(node.func) in _TESTS:
            return any("(" in text and self._may_be(text) for text in self._texts_of_test(node))
        if last_name(node.func) not in {"int", "float"} or not node.args:
            return False
        parts = list(ast.walk(node.args[0]))
        is_cut = any(text_constant(part) in {"_", *self._prefixes} for part in parts)
        return is_cut and any(map(self._is_checkpoint, parts))

    def _texts_of_test(self, node: ast.AST) -> list[str]:
        """Return the texts that names are compared with, if a node does so."""
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and last_name(node.func) in _TESTS:
            values = [*node.args, getattr(node.func, "value", node.func)]
        elif isinstance(node, ast.Compare) and last_name(node.left) != "__name__":
            is_test = isinstance(node.ops[0], ast.Eq | ast.In | ast.NotEq | ast.NotIn)
            values = [node.left, *node.comparators] if is_test else []
        parts = [part for one in values for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        return [text for one in parts if (text := self._module.text(one)).strip("*")]

    def _is_spared(self, node: ast.AST) -> bool:
        """Return whether tests around a call exclude directories or checkpoints, or directories have their own call."""
        for test, holds in self._guards(node):
            if isinstance(test, ast.UnaryOp):
                test, holds = test.operand, not holds
            for one in test.values if isinstance(test, ast.BoolOp) else [test]:
                operation = one.ops[0] if isinstance(one, ast.Compare) else None
                is_alike = holds is not isinstance(operation, ast.NotEq | ast.NotIn)
                texts = self._texts_of_test(one)
                if not holds and _called(one) & _IS_FOLDER:
                    return True
                # That a name is not this one says little of it.
                says_much = is_alike or not isinstance(operation, ast.Eq | ast.NotEq)
                if texts and says_much and any(map(self._may_be, texts)) is not is_alike:
                    return True
        around = [one for one in self._module.above(node) if isinstance(one, ast.If | ast.IfExp | ast.Try)]
        by_kind = (one for one in around if isinstance(one, ast.Try) or _called(one.test) & (_IS_FOLDER | _IS_FILE))
        return any(_called(one) & _FOR_FOLDERS for one in by_kind)

    def _guards(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """Yield the tests whose result is known at a node: those around it, and those before that would have left."""
        for parent in self._module.above(node):
            body = getattr(parent, "body", None)
            block = body if isinstance(body, list) else [body]
            if isinstance(parent, ast.If | ast.While | ast.IfExp) and node is not parent.test:
                yield parent.test, node in block
            elif isinstance(parent, ast.ListComp | ast.SetComp | ast.GeneratorExp) and node is parent.elt:
                yield from ((test, True) for one in parent.generators for test in one.ifs)
            for before in block[: block.index(node)] if node in block else []:
                if isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVES):
                    yield before.test, False
            node = parent


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def _called(node: ast.AST) -> set[str]:
    return {last_name(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}


def _names_in(node: ast.AST) -> list[ast.expr]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute | ast.Call)]
