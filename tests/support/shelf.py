"""A path class that a user registers with epath: ``shelf://``, a folder of this machine under other names."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from etils import epath

from tests.support.s3 import Folders

_ROOTS: dict[str, Path] = {}  # name of a shelf → its folder
_log: list[str] = []


@epath.register_path_cls("shelf://")
class ShelfPath(pathlib.PurePosixPath):
    """No more methods than a user's class needs."""

    def __new__(cls, *parts: Any) -> Self:
        """Takes ``shelf://name/…``; pathlib keeps it as ``shelf:/name/…``."""
        return super().__new__(cls, *(os.fspath(part).replace("shelf://", "shelf:/") for part in parts))

    def __fspath__(self) -> str:
        """The URL."""
        return str(self).replace("shelf:/", "shelf://", 1)

    @property
    def _local(self) -> Path:
        _log.append(str(self))
        _, name, *rest = self.parts
        return _ROOTS[name].joinpath(*rest) if name in _ROOTS else Path("/nowhere")

    def iterdir(self) -> Iterator[Self]:
        """As of pathlib, like those below."""
        return iter([self / child.name for child in self._local.iterdir()])


def _of_local(name: str) -> Callable[..., Any]:
    return lambda path, *args, **options: getattr(path._local, name)(*args, **options)


for _name in ("exists", "is_dir", "open", "stat", "mkdir", "unlink", "rmdir"):
    setattr(ShelfPath, _name, _of_local(_name))


@dataclasses.dataclass(frozen=True)
class Shelf(Folders):
    """An empty shelf for one test; the same methods as `tests.support.s3.Bucket`.

    Attributes:
        name: of the shelf.
        folder: where it is.
    """

    name: str
    folder: Path

    @property
    def url(self) -> str:
        """Of the shelf."""
        return f"shelf://{self.name}"

    @property
    def proxy(self) -> Any:
        """What notes each access."""
        return SimpleNamespace(log=_log)

    def keys(self, prefix: str = "") -> list[str]:
        """Of all files."""
        files = (file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file())
        return sorted(file for file in files if file.startswith(prefix))

    def get(self, key: str) -> bytes:
        """A file's content."""
        return (self.folder / key).read_bytes()

    def put(self, key: str, content: bytes) -> None:
        """Writes a file."""
        (self.folder / key).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / key).write_bytes(content)

    def delete(self, key: str) -> None:
        """Deletes a file."""
        (self.folder / key).unlink()


def new_shelf(name: str, folder: Path) -> Shelf:
    """A shelf in a folder."""
    folder.mkdir(parents=True)
    _ROOTS[name] = folder
    return Shelf(name, folder)
