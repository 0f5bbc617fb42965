"""The pairs of releases, with what they were used with at their time, and the table of the guide, from results.json."""

import dataclasses
import json
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Release:
    """A release of Flax and of Orbax.

    Attributes:
        flax, orbax: versions.
        jax: version of jax and jaxlib.
        python: version of Python.
        others: requirements for the rest.
    """

    flax: str
    orbax: str
    jax: str
    python: str
    others: str = ""

    @property
    def requirements(self) -> list[str]:
        """What pip installs."""
        pinned = {"flax": self.flax, "orbax-checkpoint": self.orbax, "jax": self.jax, "jaxlib": self.jax}
        return [f"{name}=={version}" for name, version in pinned.items()] + self.others.split()


_2023 = "scipy<1.12 chex<0.1.85 etils<1.7 optax==0.1.7"
_2024 = "numpy<2 scipy<1.13 chex<0.1.87 etils<1.9 optax==0.2.2"
_ALL = [
    Release("0.7.0", "0.2.7", "0.4.13", "3.10", f"tensorstore==0.1.40 numpy==1.25.2 ml-dtypes==0.2.0 {_2023}"),
    Release("0.7.2", "0.3.5", "0.4.18", "3.10", f"tensorstore==0.1.45 numpy==1.26.4 ml-dtypes==0.3.1 {_2023}"),
    Release("0.7.4", "0.4.1", "0.4.18", "3.10", f"tensorstore==0.1.46 numpy==1.26.4 ml-dtypes==0.3.1 {_2023}"),
    Release("0.7.5", "0.4.4", "0.4.23", "3.10", f"tensorstore==0.1.56 ml-dtypes==0.4.0 {_2024}"),
    Release("0.8.2", "0.5.7", "0.4.25", "3.10", f"tensorstore==0.1.56 ml-dtypes==0.4.0 {_2024}"),
    Release("0.8.4", "0.5.15", "0.4.28", "3.10", f"tensorstore==0.1.60 ml-dtypes==0.4.0 {_2024}"),
    Release("0.9.0", "0.6.4", "0.4.33", "3.11", "tensorstore==0.1.66 numpy==2.1.2 ml-dtypes==0.5.0 chex<0.1.88"),
    Release("0.10.2", "0.10.3", "0.4.38", "3.11", "tensorstore==0.1.71 numpy==2.2.2 ml-dtypes==0.5.1 chex<0.1.89"),
    Release("0.10.6", "0.11.16", "0.6.2", "3.11", "tensorstore==0.1.75 numpy==2.3.1 ml-dtypes==0.5.1"),
    Release("0.12.1", "0.11.30", "0.8.1", "3.11", "tensorstore==0.1.80 numpy==2.3.5 ml-dtypes==0.5.4"),
    Release("0.12.8", "0.12.8", "0.10.2", "3.11", "tensorstore==0.1.86"),
]
RELEASES = {f"{one.flax}+{one.orbax}": one for one in _ALL}


RESULTS = Path(__file__).with_name("results.json")
GUIDE = Path(__file__).parents[2] / "migration_guide" / "formats.md"
_PLACE = re.compile(
    r"(?<=<!-- table: python -m tests.readers_matrix --write -->\n).*(?=<!-- end of the table -->)", re.DOTALL
)
_COLUMNS = [
    "msgpack",
    *(f"{way}-default" for way in ("flax", "pytree", "standard", "manager")),
]
_HEAD = """\
| | msgpack file | Orbax's format | | | |
|---|---|---|---|---|---|
| Flax, Orbax | Flax | Flax | PyTree | Standard | Manager |
"""
_CASES = {
    "whole": "one device: ",
    "sharded": "sharded arrays: ",
    "processes": "saved by two processes: ",
    "text": "text: ",
}
# What the release raised → why.
_REASONS = {
    r"structure file does not exist|IsADirectoryError|KeyError": "it needs a second form of the tree: use msgpack",
    r"Unsupported type: <class 'str'>|NotImplementedError|name/\.zarray\" in OCDBT": "its reader takes no texts",
    r"Sharding of jax.Array cannot be None": "it restores no arrays without a sharding",
    r"not configured to allow OCDBT": "it reads jax arrays once a `PyTreeCheckpointHandler(use_ocdbt=True)` was made",
    r"\.zarray\S* does not exist": "it reads a folder for each array, a layout that this library does not write",
}


def record(name: str, found: dict[str, str]) -> None:
    """Keep what a release reads: case/way → "", or the reason."""
    RESULTS.write_text(json.dumps({**results(), name: found}, indent=1, ensure_ascii=False) + "\n")


def results() -> dict[str, dict[str, str]]:
    """Return what each release reads, by case/way."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def row(name: str, notes: list[str]) -> str:
    """Return the line of a release; add its reasons to the notes."""
    found = results()[name]
    return f"| {name.replace('+', ', ')} | {' | '.join(_cell(way, found, notes) for way in _COLUMNS)} |"


def _cell(way: str, found: dict[str, str], notes: list[str]) -> str:
    reasons = {case: _reason(found[f"{case}/{way}"]) for case in _CASES if f"{case}/{way}" in found}
    if not reasons:
        return ""
    failed = {case: why for case, why in reasons.items() if why}
    if len(failed) == len(reasons):
        return f"no {' '.join(_note(why, notes) for why in dict.fromkeys(failed.values()))}"
    return "; ".join(["yes", *(f"{_CASES[case]}no {_note(why, notes)}" for case, why in failed.items())])


def _reason(result: str) -> str:
    return next(
        (why for pattern, why in _REASONS.items() if re.search(pattern, result)), f"`{result}`" if result else ""
    )


def _note(reason: str, notes: list[str]) -> str:
    if reason not in notes:
        notes.append(reason)
    return f"({notes.index(reason) + 1})"


def text() -> str:
    """Return the table with its notes."""
    found, notes = results(), list[str]()
    lines = [
        row(name, notes) for name in sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    ]
    return _HEAD + "\n".join(lines) + "\n\n" + "".join(f"{n}. {why}\n" for n, why in enumerate(notes, 1))


def write_guide() -> None:
    """Write the table between its marks."""
    GUIDE.write_text(_PLACE.sub(lambda _: text(), GUIDE.read_text()))
