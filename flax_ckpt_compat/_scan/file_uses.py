"""Find the code that expects a checkpoint to be one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from .evaluation import Evaluation
from .guards import guards
from .library import ARCHIVE, FILE_SYSTEMS
from .listings import ALL, DIRECTORIES, FILES, Listing
from .modules import Module
from .names import last_name, written
from .values import CHECKPOINT, ENTRY, LIBRARY, MENTION, Value, texts

# Calls that expect a file, by the last names of the function, and methods of paths that do.
CALLS = {
    "remove": {"os.remove", "os.unlink", "gfile.remove", "gfile.Remove", "io.remove"},
    "copy": {"shutil.copy", "shutil.copy2", "shutil.copyfile", "gfile.copy", "gfile.Copy", "io.copy", "os.link"},
    "open": {"open", "io.open", "gfile.GFile", "gfile.Open", "io.GFile", "epath.open", "fsspec.open", "gzip.open"}
    | {
        "aiofiles.open",
        "bz2.open",
        "codecs.open",
        "filecmp.cmp",
        "fileinput.input",
        "io.read_file",
        "linecache.getlines",
        "lzma.open",
    }
    | {"np.fromfile", "np.load", "np.memmap", "numpy.fromfile", "numpy.load", "numpy.memmap", "os.truncate"},
    "is-file": {"path.isfile"},
    "size": {"path.getsize", "os.stat", "gfile.stat"},
    "upload": {"huggingface_hub.upload_file"},
    "glob": {"glob.glob", "glob.iglob", "gfile.glob", "gfile.Glob", "io.glob"},
}
METHODS = {
    "remove": {"unlink"},
    "copy": {"hardlink_to", "copy_file"},
    "open": {"open", "read_bytes"},
    "is-file": {"is_file"},
    "size": {"stat"},
    "upload": {"add_file", "upload_file", "upload_from_filename", "fput_object"},
    "glob": {"glob", "rglob", "iglob"},
}
# Methods of fsspec's file systems that take a file, unless they are told to be recursive.
_OF_FILE_SYSTEMS = {"rm": "remove", "rm_file": "remove", "cp_file": "copy", "get_file": "copy", "put_file": "copy"}
_OF_FILE_SYSTEMS |= {"copy": "copy", "cp": "copy", "get": "copy", "put": "copy", "download": "copy", "upload": "copy"}
_OF_FILE_SYSTEMS |= {"isfile": "is-file", "size": "size", "open": "open", "cat": "open", "cat_file": "open"}
_MOST_PATHS = 2
_OF_FILES_AND_FOLDERS = [
    ({"remove", "unlink", "Remove"}, {"rmtree", "DeleteRecursively"}),
    ({"copy", "copy2", "copyfile", "Copy"}, {"copytree"}),
]
_TAKE_FOLDERS = {"shutil.copytree", "shutil.move", "shutil.rmtree"}
_OF_ARGUMENT = {"upload", "glob"}  # methods whose argument is the checkpoint
_OF_ENTRIES = {"remove", "copy", "is-file", "upload"}  # what fails on any entry of a run directory
_SIZES = {"st_size", "length", "size"}
_RE_FUNCTIONS = {"findall", "finditer", "fullmatch", "match", "search"}
_NUMBER_TESTS = {"isdecimal", "isdigit", "isnumeric"}
_RE_TESTS = {"match", "search", "fullmatch"}  # say only yes or no where their pattern has no group
_GROUP = re.compile(r"(?<!\\)\((?!\?[:=!<](?!=|!))|\(\?P<")
_SHELL = {
    "os.system",
    "os.popen",
    *(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen")),
}
_SHELL |= {"subprocess.getoutput", "sh.cp", "get_ipython.system"}
# Commands that expect files, unless an option says that they go down into directories.
_COMMANDS = {
    "shell-copy": re.compile(r"\b(cp|scp|gsutil|rsync|azcopy)\b|(?<![.\w-])zip\b"),
    "shell-remove": re.compile(r"(?<!gsutil )(?<!s3 )\b(rm|unlink)\b"),
    "open": re.compile(
        r"(?=.*\bcurl\b).*(^|\s)(-T|-F|--upload-file|--data-binary)(\s|$)|"
        r"\b(cat|bzip2|gzip|pigz|lz4|xz|zstd|b2sum|md5sum|sha1sum|sha224sum|sha256sum|sha384sum|sha512sum)\b"
    ),
}
_RECURSIVE = re.compile(r"(^|\s)(-\w*[raR]\w*|--recursive|--archive|mv)\b")
_FILE_FIRST = {"isdir", "is_dir", "IsDirectory"}

Found = Iterator[tuple[str, ast.AST]]


class FileUses:
    """The uses of checkpoints as files in one module."""

    def __init__(self, evaluation: Evaluation, module: Module) -> None:
        self._evaluation, self._module, self._names = evaluation, module, module.names
        imported = (name for one in evaluation.project.modules for name in one.names.all())
        self._has_epath = any(name.partition(".")[0] == "etils" for name in imported)  # whose `copy` takes files only

    def found(self) -> Found:
        """Give each use, as the kind of finding and the node."""
        for node in self._module.nodes:
            if isinstance(node, ast.Call | ast.Compare) and self._selects(node):
                self._looks_for_checkpoints(node)
            if isinstance(node, ast.Call):
                yield from ((kind, node) for kind in self._of_call(node))
            elif isinstance(node, ast.While) and self._polls(node):
                yield "poll", node
        for listing in self._evaluation.listings.by_id.values():
            if listing.module is self._module and listing.has_checkpoints and listing.gives in (ALL, FILES):
                yield ("glob" if listing.gives == ALL else "file-names"), listing.call

    def _of_call(self, node: ast.Call) -> Iterator[str]:
        """Give the kinds of file operation that a call performs on a checkpoint."""
        for kind, values in self._operations(node):
            if self._is_used(kind, values, node) and not self._is_spared(kind, node):
                yields_to_restore = id(node) in self._evaluation.file_tests
                is_of_any = kind == "is-file" and not yields_to_restore and not self._holds_any(values)
                yield "only-files" if is_of_any else kind
        yield from self._of_shell(node)
        if self._parses(node):
            yield "parse-name"
        if self._removes_directories(node):
            yield "remove-folders"

    def _operations(self, node: ast.Call) -> Iterator[tuple[str, list[ast.expr]]]:
        """Give the file operations of a call, and of functions that are passed to it, with what they are done to."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        kind = self.kind_of(node.func)
        if kind == "copy":
            values = values[:1]  # it may overwrite the other one
        if kind:
            yield kind, values
        elif of_system := self._of_file_system(node):
            yield of_system, values[:1]
        elif isinstance(node.func, ast.Attribute) and not self._is_of_project(node.func):
            method = next((kind for kind, methods in METHODS.items() if node.func.attr in methods), None)
            if method:
                yield method, values if method in _OF_ARGUMENT else [node.func.value]
            if node.func.attr == "copy" and node.args and self._has_epath:
                yield "copy", [node.func.value]
            if node.func.attr == "write" and self._is_archive(node.func.value):
                yield "upload", values[:1]
        passed = [
            (one, kind) for one in values if isinstance(one, ast.Name | ast.Attribute) and (kind := self.kind_of(one))
        ]
        for function, of_it in passed:
            others = [one for one in values if one is not function]
            inner = [part for one in others for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
            receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            yield of_it, inner or receiver

    def _is_of_project(self, function: ast.expr) -> bool:
        return any(True for _ in self._evaluation.functions(self._module, function))

    def kind_of(self, function: ast.expr) -> str | None:
        """Return the kind of file operation that a function of a library performs, or None."""
        dotted = self._names.of(function) or (
            written(function) if isinstance(function, ast.Name | ast.Attribute) else ""
        )
        passed_on = self._evaluation.value(self._module, function) if self._names.of(function) is None else ()
        names = [dotted, *(str(tag.of) for tag in passed_on if tag.kind == LIBRARY and not tag.place)]
        if _TAKE_FOLDERS.intersection(names):  # `copytree` or `copy`, whichever fits
            return None
        tails = {".".join(name.split(".")[-2:]) for name in names}
        return next((kind for kind, calls in CALLS.items() if tails & calls), None)

    def _of_file_system(self, node: ast.Call) -> str | None:
        """Return the kind of file operation that a method of fsspec's file systems performs, or None."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _OF_FILE_SYSTEMS:
            return None
        holder = self._evaluation.value(self._module, node.func.value)
        is_one = any(tag.kind == LIBRARY and str(tag.of).startswith(FILE_SYSTEMS) for tag in holder)
        is_recursive = any(keyword.arg == "recursive" for keyword in node.keywords) or len(node.args) > _MOST_PATHS
        return _OF_FILE_SYSTEMS[node.func.attr] if is_one and not is_recursive else None

    def _is_used(self, kind: str, nodes: list[ast.expr], node: ast.Call) -> bool:
        values = [self._evaluation.value(self._module, one) for one in nodes]
        if id(node) in self._evaluation.file_tests:
            return True
        if kind == "glob":
            return any(map(self._evaluation.is_checkpoint, values))
        if kind == "open" and any(
            map(_is_mode_to_write, [*nodes, *node.args, *(keyword.value for keyword in node.keywords)])
        ):
            return False
        if kind == "size" and last_name(node.func) == "stat" and not self._asks_size(node):
            return False
        if kind == "size" and self._asks_whether_empty(node):
            return False
        if any(map(self._evaluation.is_checkpoint, values)):
            return True
        if any(map(self._evaluation.is_link, values)):
            return kind not in {"remove"}
        return kind in _OF_ENTRIES and any(map(self.is_entry_of_run, values))

    def _holds_any(self, nodes: list[ast.expr]) -> bool:
        values = [self._evaluation.value(self._module, one) for one in nodes]
        return any(self._evaluation.is_checkpoint(value) or self._evaluation.is_link(value) for value in values)

    def is_entry_of_run(self, value: Value) -> bool:
        """Return whether a value is any entry of a directory that checkpoints are saved to."""
        listings = self._evaluation.listings.by_id
        listed = [listings[int(tag.of)] for tag in value if tag.kind == ENTRY and not tag.place and not tag.piece]
        return any(one.of_run and one.gives == ALL for one in listed)

    def _is_spared(self, kind: str, node: ast.Call) -> bool:
        """Return whether a call is made only where a path is no directory, as in fixed code, or its error is caught."""
        if self._has_branch_for_folders(node) or self._catches_folders(node):
            return True
        if kind == "is-file":
            return False
        for test, is_true in guards(self._module, node):
            first = test.values[0] if isinstance(test, ast.BoolOp) else test
            if isinstance(first, ast.UnaryOp) and isinstance(first.op, ast.Not):
                first, is_true = first.operand, not is_true
            if not is_true and isinstance(first, ast.Call) and last_name(first.func) in _FILE_FIRST:
                return True
        return False

    def _has_branch_for_folders(self, node: ast.Call) -> bool:
        """Return whether ``os.path.isfile`` chooses between this call, or is it, and the like of it for directories."""
        for child, parent in self._module.above(node):
            if not isinstance(parent, ast.If | ast.IfExp):
                continue
            is_negated = isinstance(parent.test, ast.UnaryOp) and isinstance(parent.test.op, ast.Not)
            asked = {last_name(part.func) for part in ast.walk(parent.test) if isinstance(part, ast.Call)}
            branches = [one if isinstance(one, list) else [one] for one in (parent.body, parent.orelse)]
            of_files, of_folders = reversed(branches) if is_negated else branches
            if asked & {"isfile", "is_file"} and child not in of_folders and _does_the_same(of_files, of_folders):
                return True
        return False

    def _catches_folders(self, node: ast.Call) -> bool:
        """Return whether what a directory raises here is caught, and the like is done for directories then."""
        tries = [(child, parent) for child, parent in self._module.above(node) if isinstance(parent, ast.Try)]
        handlers = [one for child, parent in tries if child in parent.body for one in parent.handlers]
        return any(
            last_name(part) in {"IsADirectoryError", "OSError", "PermissionError"} and _does_the_same([node], one.body)
            for one in handlers
            if one.type is not None
            for part in (one.type.elts if isinstance(one.type, ast.Tuple) else [one.type])
        )

    def _asks_size(self, node: ast.Call) -> bool:
        """Return whether the size is used of what ``stat`` returns."""
        parent = self._module.parents.get(id(node))
        if isinstance(parent, ast.Attribute):
            return parent.attr in _SIZES
        names = {target.id for target in getattr(parent, "targets", ()) if isinstance(target, ast.Name)}
        attributes = [one for one in self._module.nodes if isinstance(one, ast.Attribute) and one.attr in _SIZES]
        return any(isinstance(one.value, ast.Name) and one.value.id in names for one in attributes)

    def _asks_whether_empty(self, node: ast.Call) -> bool:
        """Return whether a size is compared with 0, which that of a directory's entry is not, either."""
        for _, parent in self._module.above(node):
            if isinstance(parent, ast.Compare):
                return any(
                    isinstance(one, ast.Constant) and one.value == 0 for one in [parent.left, *parent.comparators]
                )
            if not isinstance(parent, ast.Attribute):
                break
        return False

    def _is_archive(self, node: ast.expr) -> bool:
        return any(tag == (LIBRARY, ARCHIVE, (), False) for tag in self._evaluation.value(self._module, node))

    def _of_shell(self, node: ast.Call) -> Iterator[str]:
        dotted = self._names.of(node.func) or written(node.func).replace("()", "")
        if dotted not in _SHELL or not node.args:
            return
        parts = [part for part in ast.walk(node) if isinstance(part, ast.expr)]
        values = [self._evaluation.value(self._module, part) for part in parts]
        mentioned = any(tag.kind in (CHECKPOINT, MENTION) for value in values for tag in value)
        if not mentioned and not any(map(self._evaluation.is_checkpoint, values)):
            return
        words = " ".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        words = " ".join([words, *(one for value in values for one in texts(value))])
        for kind, commands in _COMMANDS.items():
            if commands.search(words) and not _RECURSIVE.search(words):
                yield kind

    def _parses(self, node: ast.Call) -> bool:
        """Return whether a call makes a number of a checkpoint's name, or takes it apart by a regular expression."""
        dotted = self._names.of(node.func) or (node.func.id if isinstance(node.func, ast.Name) else "")
        values = [self._evaluation.value(self._module, arg) for arg in node.args]
        if dotted in {"int", "float"}:
            held = any(tag.kind == CHECKPOINT and not tag.place for value in values for tag in value)
            return (held or any(map(self._evaluation.is_checkpoint, values))) and not self._is_number(node)
        name = last_name(node.func)
        if name not in _RE_FUNCTIONS or not isinstance(node.func, ast.Attribute):
            return False
        of_module = dotted.startswith("re.")
        if not values:
            return False
        subjects = values[1:] if of_module else values[:1]
        pattern = values[0] if of_module else self._evaluation.value(self._module, node.func.value)
        is_asked = any(map(self._evaluation.is_checkpoint, subjects)) or self._looks_for_checkpoints(node)
        only_asks = name in _RE_TESTS and bool(texts(pattern)) and not any(map(_GROUP.search, texts(pattern)))
        return is_asked and not only_asks

    def _is_number(self, node: ast.Call) -> bool:
        """Return whether a test has found that a text is a number: then no name makes it fail."""
        asked = [part for test, is_true in guards(self._module, node) if is_true for part in ast.walk(test)]
        return any(isinstance(part, ast.Call) and last_name(part.func) in _NUMBER_TESTS for part in asked)

    def _selects(self, node: ast.expr) -> bool:
        """Return whether a test asks for names, and is no test that passes over them; nothing may be done to them."""
        is_asked = True
        for child, parent in self._module.above(node):
            if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
                is_asked = not is_asked
            elif isinstance(parent, ast.If | ast.IfExp | ast.While) and child is parent.test:
                passes_over = isinstance(parent, ast.If) and isinstance(parent.body[0], ast.Continue)
                return is_asked is not passes_over
            elif not isinstance(parent, ast.BoolOp):
                is_filter = isinstance(parent, ast.comprehension | ast.GeneratorExp | ast.ListComp | ast.Return)
                return is_asked and (is_filter or isinstance(parent, ast.Assert))
        return False

    def _looks_for_checkpoints(self, node: ast.Call | ast.Compare) -> bool:
        """Return whether a test tells the checkpoints among the entries of a listing."""
        asked = node.args if isinstance(node, ast.Call) else [node.left, *node.comparators]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = [node.func.value, *asked]
        before = [self._evaluation.before_tests(self._module, arg) for arg in asked]
        numbers = {int(tag.of) for value in before for tag in value if tag.kind == ENTRY}
        listings = self._evaluation.listings
        told = [number for number in numbers if listings.says(self._module, node, True, number) == "checkpoint"]
        for number in told:
            listings.by_id[number].has_checkpoints = True
        return bool(told)

    def _removes_directories(self, node: ast.Call) -> bool:
        """Return whether a call removes the directories in a run directory: checkpoints are among them."""
        if last_name(node.func) not in {"rmtree", "rmdir", "DeleteRecursively"}:
            return False
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        values = [self._evaluation.value(self._module, one) for one in [*receiver, *node.args]]
        listings = self._evaluation.listings.by_id
        listed = [listings[int(tag.of)] for value in values for tag in value if tag.kind == ENTRY and not tag.place]
        of_run = [one for one in listed if one.of_run and one.gives in (ALL, DIRECTORIES)]
        if last_name(node.func) == "rmdir":  # of what is empty, as all are from the bottom up once all files are gone
            of_run = [one for one in of_run if not self._removes_all_files(one)]
        if not of_run:
            return False
        asked = [
            last_name(part.func)
            for test, _ in guards(self._module, node)
            for part in ast.walk(test)
            if isinstance(part, ast.Call)
        ]
        tolerant = any(keyword.arg == "ignore_errors" for keyword in node.keywords)
        return tolerant or bool(_FILE_FIRST & set(asked)) or any(one.gives == DIRECTORIES for one in of_run)

    def _removes_all_files(self, listing: Listing) -> bool:
        """Return whether a program removes each file that a walk from the bottom up gives."""
        is_upwards = any(one.arg == "topdown" and written(one.value) == "False" for one in listing.call.keywords)
        listings = self._evaluation.listings.by_id
        numbers = {number for number, one in listings.items() if one.call is listing.call and one.gives == FILES}
        calls = (node for node in self._module.nodes if isinstance(node, ast.Call) and node.args)
        removing = (node for node in calls if self.kind_of(node.func) == "remove")
        return is_upwards and any(
            tag.kind == ENTRY and int(tag.of) in numbers
            for node in removing
            for tag in self._evaluation.before_tests(self._module, node.args[0])
        )

    def _polls(self, node: ast.While) -> bool:
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
        asked = [call for call in calls if last_name(call.func) in {"exists", "Exists", "isfile", "is_file"}]
        values = [value for call in asked for value in (*call.args, getattr(call.func, "value", None))]
        held = any(self._evaluation.holds(self._module, value) for value in values)
        return held and any(last_name(call.func) == "sleep" for call in calls)


def _does_the_same(of_files: Sequence[ast.AST], of_folders: Sequence[ast.AST]) -> bool:
    """Return whether code does to directories what other code does to files."""
    files, folders = (
        {last_name(part) for one in nodes for part in ast.walk(one) if isinstance(part, ast.Name | ast.Attribute)}
        for nodes in (of_files, of_folders)
    )
    return any(files & one and folders & other for one, other in _OF_FILES_AND_FOLDERS)


def _is_mode_to_write(node: ast.expr) -> bool:
    """Return whether an argument opens a file to write it: then it is not a checkpoint of the legacy API."""
    mode = node.value if isinstance(node, ast.Constant) else None
    return isinstance(mode, str) and bool(re.fullmatch(r"[wax][bt+]*", mode))
