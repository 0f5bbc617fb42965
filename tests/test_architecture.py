"""Imports point downwards: each part imports itself and parts below it, and only one module knows the backends."""

import ast
import collections
import functools
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "flax_ckpt_compat"
# From the top down; parts of one line do not import each other.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"__init__"},
    {"_patching", "_scan"},
    {"api", "checkpoints"},
    {"_convert"},
    {"_view"},
    {"_restore"},
    {"_save"},
    {"_suggest"},
    {"transforms"},
    {"rules"},
    {"_discovery"},
    {"_trees"},
    {"config", "errors"},
    {"legacy", "orbax_backend"},
    {"_core"},
)
# How large each room may be, and how large those are today that are over it. A number may fall in any commit; it rises
# only in one that says why and takes as much away elsewhere.
BUDGETS = [
    row.split("\t")
    for row in (ROOT / "tests" / "data" / "budgets.tsv").read_text(encoding="utf-8").splitlines()
    if not row.startswith("#")
]
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}
# The _gda folders of msgpack checkpoints hold TensorStore arrays; old Orbax directories hold a msgpack file.
FORMAT_LIBRARIES = {"msgpack", "tensorstore", "zarr", "orbax"}
ALLOWED = {"legacy": {"msgpack", "tensorstore"}, "orbax_backend": {"msgpack", "tensorstore"}}


def module_of(file: Path) -> str:
    """Return the dotted name that a file is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for folder in (PACKAGE, *ALLOWED) for file in sorted((ROOT / folder).rglob("*.py"))}


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Return every module that a file imports anywhere in it, by absolute name."""
    file = FILES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, f"{file}:{node.lineno} imports from '..'"
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            names = {f"{base}.{alias.name}" for alias in node.names}
            inside = names & FILES.keys()
            found |= inside if len(inside) == len(names) else inside | {base}
    return frozenset(found)


def part_of(module: str) -> str:
    """Return the part of a module of ours: the folder, or the file directly in the package."""
    return [*module.split("."), "__init__"][1]


def test_imports_point_downwards() -> None:
    """No part imports one above it or beside it."""
    for module in FILES:
        for imported in imports_of(module):
            here, there = part_of(module), part_of(imported)
            if imported.split(".")[0] == PACKAGE and here != there and (here, there) != ("cli", "__init__"):
                assert LAYER[here] < LAYER[there], f"{module} imports {imported}"
                assert there not in ALLOWED, f"{module} imports {imported}: _discovery.formats does that, by name"


def test_format_libraries() -> None:
    """Each format library is used by its backends alone, TensorStore also by the object stores, orbax by none."""
    for module in FILES:
        tops = {imported.split(".")[0] for imported in imports_of(module)}
        assert not tops & ALLOWED.keys(), f"{module} imports a backend by its folder, which makes a second copy of it"
        is_store = module.startswith(f"{PACKAGE}._core.object_store")
        allowed = ALLOWED.get(part_of(module), {"tensorstore"} if is_store else set())
        if module == f"{PACKAGE}._discovery.foreign":  # tells whether a file begins as msgpack
            allowed = {"msgpack"}
        forbidden = FORMAT_LIBRARIES | ({"jax", "flax"} if part_of(module) == "_core" else set())
        assert not tops & forbidden - allowed, f"{module} imports {tops & forbidden - allowed}"


def test_no_cycles() -> None:
    """No two modules import each other, however far around."""
    graph = {module: imports_of(module) & FILES.keys() - {module, PACKAGE} for module in FILES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_budgets() -> None:
    """No room has more files or lines than its budget, or, where it is over that still, than were written down last."""
    row_of = {ROOT / folder: row[0] for row in BUDGETS for folder in row[0].split()}
    found = collections.defaultdict(lambda: [0, 0])
    for top in {Path(row[0]).parts[0] for row in BUDGETS}:
        for file in (ROOT / top).rglob("*.py"):
            # A folder without a row belongs to the room that it lies in.
            room = next(row_of[parent] for parent in file.parents if parent in row_of)
            found[room][0] += 1
            found[room][1] += len(file.read_text(encoding="utf-8").splitlines())
    over = []
    for room, *numbers in BUDGETS:
        budget, today = [*map(int, numbers[:2])], [*map(int, numbers[2:])]
        over += [f"{room}: {found[room]} files and lines, at most {today or budget}"] * any(
            one > limit for one, limit in zip(found[room], today or budget, strict=True)
        )
        if today and all(one <= limit for one, limit in zip(found[room], budget, strict=True)):
            over.append(f"{room} is within its budget: delete its last two numbers")
    assert not over, "\n".join(over)
