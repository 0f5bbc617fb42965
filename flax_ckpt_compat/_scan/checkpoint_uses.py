"""Find the uses of the legacy API in a module, and the calls that treat a path as one file."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from .findings import CHECK, KINDS
from .source_modules import API, CHECKPOINT, LISTED, LISTINGS, OURS, Module, argument, is_other_file, last_name

_UTILS = "flax.training.orbax_utils"
_FLAG = "flax_use_orbax_checkpointing"

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
_GLOBS = {"glob", "iglob", "rglob", "Glob"}
_TESTS = {"startswith", "endswith", "match", "fullmatch", "search", "fnmatch", "fnmatchcase", "filter", "findall"}
_IS_FOLDER = {"isdir", "is_dir", "IsDirectory"}
_IS_FOLDER_OR_FILE = {*_IS_FOLDER, "isfile", "is_file"}
_LEAVES = ast.Continue | ast.Return | ast.Raise
_FOR_FOLDERS = {"rmtree", "copytree", "DeleteRecursively"}
_NO_SIZE = re.compile(r"st_(?!size)\w+|[<>=] ?0\b")  # another fact, or only whether there is anything
_MODE_TO_WRITE = re.compile(r"[wax][bt+]*")
_SHELLS = re.compile(r"os\.(system|popen)|subprocess\.\w+|get_ipython\(\)\.system")
_COMMANDS = re.compile(r"cp|scp|gsutil|rsync|azcopy|aws|zip|rm|unlink|cat|curl|gzip|pigz|bzip2|xz|zstd|lz4|\w+sum")
_TAKES_FOLDERS = re.compile(r"(-\w*[raR]\w*|--recursive|--archive|mv)$")
_SHORTEST = 3  # letters that say what a name is

Found = Iterator[tuple[str, ast.AST]]


def api_name(module: Module, node: ast.AST) -> str:
    """Return the name of the legacy API that an expression stands for, or ""."""
    package, _, name = module.dotted(node).rpartition(".")
    return name if package == API else ""


def api_uses(module: Module) -> Found:
    """Yield each use, as the kind of finding and the node."""
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}" if isinstance(node, ast.ImportFrom) else ""
            found = {package, *(f"{package}.{alias.name}".strip(".") for alias in node.names)}
            kinds = {API: "import", "flax.training.*": "import", _UTILS: "api"}
            yield from ((kinds[name], node) for name in found & kinds.keys())
        elif isinstance(node, ast.Call):
            yield from _calls(module, node)
        elif isinstance(node, ast.keyword) and node.arg == _FLAG:
            yield "flag", node.value
        elif str(getattr(node, "attr", getattr(node, "value", ""))).lower() == _FLAG:
            yield "flag", node
        # In another way than an import, as ``training.checkpoints``.
        is_one = isinstance(node, ast.Attribute | ast.Call | ast.Subscript)
        if is_one and module.dotted(node) == API and ast.unparse(node) != OURS:
            yield "import", node


def _calls(module: Module, node: ast.Call) -> Found:
    is_partial = module.dotted(node.func) == "functools.partial" and node.args
    name = api_name(module, node.args[0] if is_partial else node.func)
    if name or module.dotted(node.func).startswith(f"{_UTILS}."):
        yield "api", node
    # Nobody knows what stands before an unknown part; an empty text is the default of an option that was not given.
    path = module.text(argument(node, "ckpt_dir", 0)) if name.startswith(("save", "restore")) else ""
    if path and not re.match(r"[/~*?]|\w+://", path):
        yield "relative-path", node


class FileUses:
    """The calls of one module that treat a path as one file; ``prefixes`` begin the names of checkpoints."""

    def __init__(self, module: Module, prefixes: Collection[str]) -> None:
        self._module, self._prefixes = module, tuple(prefixes)
        module.set_listings(set(filter(self._lists_checkpoints, module.calls)))

    def found(self) -> Iterator[tuple[str, str, ast.AST]]:
        """Yield each call, as the kind of finding, what it asks for and the node."""
        text = self._module.text
        for node in self._module.calls:
            for kind, paths in self._operations(node):
                if action := self._action(kind, paths, node):
                    yield kind, action, node
            if node in self._module.listings:
                kind = "file-names" if last_name(node.func) == "walk" else "glob"
                yield kind, KINDS[kind].action, node
            elif last_name(node.func) == "rmtree" and any(LISTED in text(one) for one in node.args):
                yield "remove-folders", CHECK, node

    def _operations(self, node: ast.Call) -> Iterator[tuple[str, list[str]]]:
        """Yield the file operations of a call, and of functions passed to it, with the paths that they may take."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts, dotted = list(map(self._module.text, values)), self._module.dotted(node.func)
        if kind := self._kind(node.func):
            yield kind, texts[: 2 if dotted == "filecmp.cmp" else 1]
        elif _SHELLS.fullmatch(dotted or ast.unparse(node.func)) and node.args:
            yield "shell", self._files_of_command(node.args[0])
        elif isinstance(node.func, ast.Attribute) and not dotted and (method := _METHOD_KINDS.get(node.func.attr)):
            yield method, [self._module.text(node.func.value), *texts]
        for at, one in enumerate(values):
            if isinstance(one, ast.Name | ast.Attribute) and (passed := self._kind(one)):
                yield passed, [*texts[:at], *texts[at + 1 :]]

    def _kind(self, function: ast.expr) -> str | None:
        written = ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""
        return _FUNCTION_KINDS.get(".".join((self._module.dotted(function) or written).split(".")[-2:]))

    def _files_of_command(self, command: ast.expr) -> list[str]:
        """Return the words of a shell command, if it is one that passes over directories."""
        parts = command.elts if isinstance(command, ast.List | ast.Tuple) else [command]
        text = " ".join(map(self._module.text, parts))
        try:
            words = shlex.split(re.sub(r"(;|&&|\||>)", r" \1 ", text))
        except ValueError:
            words = text.split()
        return words if any(map(_COMMANDS.fullmatch, words)) and not any(map(_TAKES_FOLDERS.match, words)) else []

    def _action(self, kind: str, paths: list[str], node: ast.Call) -> str | None:
        """Return whether a call has to change, or asks for a look; None if it is about another file."""
        modes = [getattr(one, "value", "") for one in [*node.args, *(keyword.value for keyword in node.keywords)]]
        is_writing = any(isinstance(mode, str) and _MODE_TO_WRITE.fullmatch(mode) for mode in modes)
        is_fact = kind == "size" and _NO_SIZE.search(self._module.finding("", "", node).code)
        if is_fact or (kind == "open" and is_writing) or self._is_spared(node):
            return None
        said = [self._is_checkpoint(path) for path in paths]
        if True in said:
            return KINDS[kind].action
        is_likely = kind != "wrapped" and (kind != "open" or "rb" in modes)
        return CHECK if None in said and is_likely else None

    def _is_checkpoint(self, text: str) -> bool | None:
        """Return whether a text is the path of a checkpoint; None if nothing says so."""
        return False if is_other_file(text) else text.rpartition("/")[2].startswith(self._prefixes) or None

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
        pattern = self._module.text(node.args[-1]).rpartition("/")[2] if name in _GLOBS and node.args else ""
        if pattern.strip("*?"):
            return self._may_be(pattern)
        if name not in LISTINGS | _GLOBS:
            return False
        around = [one for one in self._module.above(node) if isinstance(one, ast.stmt)]
        functions = [one for one in around if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        nodes = ast.walk((functions or around)[0])
        return any(self._may_be(text) for part in nodes for text in self._texts_of_test(part))

    def _texts_of_test(self, node: ast.AST) -> list[str]:
        """Return the texts that names are compared with, if a node does so."""
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and last_name(node.func) in _TESTS:
            values = [*node.args, getattr(node.func, "value", node.func)]
        elif isinstance(node, ast.Compare) and last_name(node.left) != "__name__":
            is_test = isinstance(node.ops[0], ast.Eq | ast.In | ast.NotEq | ast.NotIn)
            values = [node.left, *node.comparators] if is_test else []
        parts = [part for one in values for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        return [text for one in parts if CHECKPOINT not in (text := self._module.text(one)) and text.strip("*?")]

    def _is_spared(self, node: ast.AST) -> bool:
        """Return whether tests around a call exclude directories or checkpoints, or directories have their own call."""
        for test, holds in self._guards(node):
            parts = list(ast.walk(test))
            is_alike = holds is not any(isinstance(one, ast.Not | ast.NotEq | ast.NotIn) for one in parts)
            if not holds and _called(test) & _IS_FOLDER:
                return True
            # That a name is not this one says little of it.
            says_much = is_alike or not any(isinstance(one, ast.Eq | ast.NotEq) for one in parts)
            texts = [text for one in parts for text in self._texts_of_test(one)] if says_much else []
            if texts and any(map(self._may_be, texts)) is not is_alike:
                return True
        around = [one for one in self._module.above(node) if isinstance(one, ast.If | ast.IfExp | ast.Try)]
        by_kind = (one for one in around if isinstance(one, ast.Try) or _called(one.test) & _IS_FOLDER_OR_FILE)
        return any(_called(one) & _FOR_FOLDERS for one in by_kind)

    def _guards(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """Yield the tests whose result is known at a node: those around it, and those before that would have left."""
        for parent in self._module.above(node):
            body = getattr(parent, "body", None)
            block = body if isinstance(body, list) else [body]
            if isinstance(parent, ast.If | ast.While | ast.IfExp) and node is not parent.test:
                yield parent.test, node in block
            for before in block[: block.index(node)] if node in block else []:
                if isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVES):
                    yield before.test, False
            node = parent


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def _called(node: ast.AST) -> set[str]:
    return {last_name(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
