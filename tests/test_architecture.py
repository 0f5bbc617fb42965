"""Imports point downwards: command line → drop-in names → saving, restoring → their parts → routing → core."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "flax_ckpt_compat"
# Façade modules from the top down; those that no line names are parts of saving and restoring.
STOREYS = (
    {"cli", "__main__"},
    {"__init__"},
    {"_install"},
    {"api", "checkpoints"},
    {"plan", "view"},
    {"saving", "restoring"},
    {"(parts)"},
    {"config", "errors", "_routing"},
    {"_detect"},
    {"_folders"},
    {"_core"},
)
# The ``_gda`` folders of msgpack checkpoints hold TensorStore arrays; old Orbax directories hold a msgpack file.
BACKENDS = {"legacy": {"msgpack", "tensorstore"}, "orbax_backend": {"msgpack", "tensorstore"}}
FORMAT_LIBRARIES = {"msgpack", "tensorstore", "zarr", "orbax"}


def module_of(file: Path) -> str:
    """The dotted name that a file is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_of(file): file
    for folder in (PACKAGE, *BACKENDS)
    for file in sorted((ROOT / folder).rglob("*.py"))
    # Scripts that the library runs but never imports for its own work.
    if file.name != "demo_train.py"
}


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Every module that a file imports anywhere in it, by its absolute name."""
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
            found.update(inside)
            if len(inside) < len(names):
                found.add(base)
    return frozenset(found)


def room_of(module: str) -> str:
    """The façade module, or the folder, that a module of ours belongs to."""
    return [*module.split("."), "__init__"][1]


def storey_of(room: str) -> int:
    """How far from the top a façade room is."""
    return next((n for n, rooms in enumerate(STOREYS) if room in rooms), STOREYS.index({"(parts)"}))


@pytest.mark.parametrize("module", FILES)
def test_imports_point_downwards(module: str) -> None:
    """A façade module imports nothing above it, and no backend; the core imports nothing of ours but itself."""
    room = room_of(module)
    for imported in imports_of(module):
        if imported.split(".")[0] != PACKAGE or room in BACKENDS:
            continue
        target = room_of(imported)
        assert target not in BACKENDS, f"{module} imports {imported}; only _routing knows backends, as text"
        if (room, target) == ("cli", "__init__"):
            continue  # the door itself loads nothing
        assert room == target or storey_of(room) <= storey_of(target), f"{module} imports {imported} from above it"


@pytest.mark.parametrize("module", [module for module in FILES if room_of(module) in BACKENDS])
def test_backends_know_only_themselves_and_the_core(module: str) -> None:
    """A backend imports itself, the core and its format libraries; never the façade or the other backend."""
    room = room_of(module)
    for imported in imports_of(module):
        top = imported.split(".")[0]
        if top == PACKAGE:
            assert room_of(imported) in (room, "_core"), f"{module} imports {imported}"
        assert top not in FORMAT_LIBRARIES or top in BACKENDS[room], f"{module} imports {imported}"


@pytest.mark.parametrize("module", FILES)
def test_nothing_imports_orbax(module: str) -> None:
    """Only the demo, which compares with it, imports orbax; the core imports tensorstore for stores alone."""
    tops = {imported.split(".")[0] for imported in imports_of(module)}
    assert not tops & BACKENDS.keys(), f"{module} imports a backend by its folder, which makes a second copy of it"
    assert "orbax" not in tops or module == f"{PACKAGE}.cli._demo_checks"
    allowed = {"tensorstore"} if module.startswith(f"{PACKAGE}._core.store") else set()
    assert room_of(module) != "_core" or not tops & {"jax", "flax", *FORMAT_LIBRARIES} - allowed


def test_no_cycles() -> None:
    """No two modules import each other, however far around."""
    graph = {module: imports_of(module) & FILES.keys() - {module, PACKAGE} for module in FILES}
    tuple(graphlib.TopologicalSorter(graph).static_order())
