"""Lists everything public with its signature: ``python -m tests.public_signatures`` writes the list anew.

It refuses to until the section Unreleased of CHANGELOG.md has the name of whatever changed.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import flax_ckpt_compat
from flax_ckpt_compat import cli

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/data/public_signatures.txt"
# Callers get these from functions and never make them: their attributes are public, their constructors are not.
RETURNED = (
    *("Checkpoint", "CheckpointRecord", "Conversion", "Diff", "LeafDifference", "Plan", "PlannedLeaf", "Suggestion"),
    *("Verification", "VerifiedCheckpoint", "VerifiedLeaf"),
)


def public_signatures() -> list[str]:
    """Return a line for each public name, method, attribute, command and option, in order."""
    return sorted({*_of_package(), *_of_commands()})


def _of_package() -> Iterator[str]:
    modules = [name for name in flax_ckpt_compat.__all__ if inspect.ismodule(getattr(flax_ckpt_compat, name))]
    yield from (f"flax_ckpt_compat.{name}" for name in modules)
    for module in [flax_ckpt_compat, *(importlib.import_module(f"flax_ckpt_compat.{name}") for name in modules)]:
        for name in module.__all__:
            value = getattr(module, name)
            is_listed = module is not flax_ckpt_compat and name in flax_ckpt_compat.__all__
            if not inspect.ismodule(value) and not is_listed and name != "__version__":
                yield from _of_name(f"{module.__name__}.{name}", value)


def _of_name(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        is_plain = isinstance(value, str | int | float | tuple)
        yield name + (_signature(value) if inspect.isroutine(value) else f" = {value!r}" if is_plain else "")
        return
    ours = [base for base in value.__mro__ if base.__module__.partition(".")[0] == "flax_ckpt_compat"]
    bases = ", ".join(base.__name__ for base in value.__mro__[1:] if base is not object and base.__name__[0] != "_")
    yield f"{name} is a {bases}" if bases else name
    if value.__name__ not in RETURNED and not issubclass(value, Exception):
        yield f"{name}{_signature(value)}"
    for key in {key for base in ours for key in (*vars(base), *inspect.get_annotations(base))}:
        if not key.startswith("_"):
            yield f"{name}.{key}{_signature(getattr(value, key)) if callable(getattr(value, key, None)) else ''}"


def _signature(function: Any) -> str:
    """Return the signature as written: annotations without quotes, defaults without addresses."""
    signature = inspect.signature(function)
    found = [
        parameter.replace(annotation=_Verbatim(parameter.annotation))
        if parameter.annotation is not parameter.empty
        else parameter
        for parameter in signature.parameters.values()
    ]
    returned = signature.return_annotation
    returns = "" if returned is signature.empty else f" -> {_Verbatim(returned)!r}"
    return re.sub(r" at 0x\w+", "", f"{inspect.Signature(found)}{returns}")


class _Verbatim:
    """An annotation whose repr is its source."""

    def __init__(self, annotation: Any):
        self._text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self._text.replace("'", '"')


def _of_commands() -> Iterator[str]:
    context = click.Context(cli.main)
    for name in cli.main.list_commands(context):
        command = cli.main.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            words = parameter.opts + parameter.secondary_opts
            yield f"flax-ckpt {name} {'/'.join(words) if isinstance(parameter, click.Option) else parameter.name}"


def unannounced(old: list[str], new: list[str], changelog: str) -> list[str]:
    """Return the names that differ between two lists, and of which Unreleased has neither them nor a new parameter."""
    section = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]
    announced = {*re.findall(r"\w+", section), *re.findall(r"\w[\w-]+", section)}
    before, after = ({_name(line): set(re.findall(r"(\w+): ", line)) for line in lines} for lines in (old, new))
    changed = {_name(line) for line in {*old} ^ {*new}}
    return sorted(
        name
        for name in changed
        if not announced & {name.rpartition(".")[2], *(before.get(name, set()) ^ after.get(name, set()))}
    )


def _name(line: str) -> str:
    return re.split(r"[( ]", line.removeprefix("flax-ckpt "))[0]


def main() -> None:
    """Write the list, or say what the changelog lacks."""
    old = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    new = public_signatures()
    missing = unannounced(old, new, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) if old else []
    if missing:
        sys.exit(f"Unreleased in CHANGELOG.md says nothing of {', '.join(missing)}; add a line, and run this again.")
    FILE.write_text("".join(f"{line}\n" for line in new), encoding="utf-8")


if __name__ == "__main__":
    main()
