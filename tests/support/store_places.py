"""One kind of test place for all: a local folder, a prefix of an S3 bucket, and one behind a failing network."""

import dataclasses
from pathlib import Path

import pytest

from tests.support import disks
from tests.support.az import AzBucket
from tests.support.gs import GsBucket
from tests.support.s3 import Bucket
from tests.support.shelf import Shelf

AnyBucket = Bucket | GsBucket | AzBucket | Shelf
# Values of the fixture `any_bucket` and of a parameter ``format``; by default each store and each format once.
BY_TURNS = [
    ("s3", "msgpack"),
    ("gs", "orbax"),
    pytest.param("s3", "orbax", marks=pytest.mark.slow),
    pytest.param("gs", "msgpack", marks=pytest.mark.slow),
]


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder of checkpoints, with ways to look at and to damage what is in it that are not the library's.

    Attributes:
        root: path or URL, as a user gives it.
        folder: the local folder, or None.
        bucket: of the URL, or None.
    """

    root: str
    folder: Path | None = None
    bucket: AnyBucket | None = None

    def __truediv__(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """What lies directly in the folder, sorted."""
        if self.folder is not None:
            return sorted(entry.name for entry in self.folder.iterdir()) if self.folder.is_dir() else []
        assert self.bucket is not None
        return sorted({key.split("/")[1] for key in self.bucket.keys("run/")})

    def get(self, name: str) -> bytes:
        """The content of a file or object."""
        if self.folder is not None:
            return (self.folder / name).read_bytes()
        assert self.bucket is not None
        return self.bucket.get(f"run/{name}")

    def contents(self) -> dict[str, bytes]:
        """Every file or object below it, with its content."""
        if self.folder is not None:
            files = [file for file in self.folder.rglob("*") if file.is_file()]
            return {str(file.relative_to(self.folder)): file.read_bytes() for file in files}
        assert self.bucket is not None
        return {key.removeprefix("run/"): self.bucket.get(key) for key in self.bucket.keys("run/")}

    def flip(self, name: str, at: int, bit: int) -> None:
        """Changes one bit of a file or object, of which a file system notices nothing."""
        if self.folder is not None:
            disks.flip(self.folder / name, at, bit)
        else:
            content = bytearray(self.get(name))
            content[at] ^= 1 << bit
            self.put(name, bytes(content))

    def put(self, name: str, content: bytes) -> None:
        """Writes a file or object."""
        if self.folder is not None:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        else:
            assert self.bucket is not None
            self.bucket.put(f"run/{name}", content)
