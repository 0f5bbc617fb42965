"""Reach ``hf://``, repositories of Hugging Face, through its own package, which copies files to its local cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flax_ckpt_compat._core.epath_store.storage import EpathLocation
from flax_ckpt_compat._core.errors import CheckpointError, StorageError, is_of_handler
from flax_ckpt_compat._core.local.storage import LocalLocation
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Source, Stat
from flax_ckpt_compat._core.storage_errors import not_found

_MISSING_FILE = ("EntryNotFoundError", "RemoteEntryNotFoundError", "LocalEntryNotFoundError")
_MISSING_REPOSITORY = ("RepositoryNotFoundError", "RevisionNotFoundError")


class HubLocation(EpathLocation):
    """A file or folder of ``hf://organization/model[@revision]/path``, for reads alone."""

    __slots__ = ()

    def list_files(self, path: str) -> dict[str, Stat]:
        with _telling(path):
            at = _resolve(path)
            try:
                entries = list(_api().list_repo_tree(recursive=True, path_in_repo=at.pop("path") or None, **at))
            except Exception as error:
                if type(error).__name__ not in _MISSING_FILE:
                    raise
                return {}
        prefix = _resolve(path)["path"]
        start = len(prefix) + 1 if prefix else 0
        files = {one.path[start:]: Stat(one.size, one.blob_id) for one in entries if hasattr(one, "blob_id")}
        return dict(sorted(files.items()))

    def find(self, path: str) -> Stat | None:
        with _telling(path):
            at = _resolve(path)
            name = at.pop("path")
            found = _api().get_paths_info(paths=[name], **at) if name else []
            return next((Stat(one.size, one.blob_id) for one in found if hasattr(one, "blob_id")), None)

    def read_range(self, path: str, start: int, stop: int | None) -> bytes:
        return LocalLocation(self._copy(path)).read(start, stop)

    def open_file(self) -> Source:
        source = LocalLocation(self._copy(self.path)).open_file()
        source.path = self.path
        return source

    def _copy(self, path: str) -> str:
        """Return the path of a local copy of a file, made now unless it is there."""
        import huggingface_hub

        with _telling(path):
            at = _resolve(path)
            return str(huggingface_hub.hf_hub_download(filename=at.pop("path"), **at))

    def prepare_directory(self) -> None:
        message = f"{self}: hf:// is only read; save to a disk or to another store, and upload that"
        raise StorageError(message, path=self.path)

    def publish(self, temporary: str, *, new: bool = False, meter: Meter = OFF) -> None:  # noqa: ARG002
        self.prepare_directory()

    def delete(self, path: str) -> None:
        self.at(path).prepare_directory()

    remove = delete


def _api() -> Any:
    import huggingface_hub

    return huggingface_hub.HfApi()


def _resolve(path: str) -> dict[str, Any]:
    """Return kind, name and revision of a repository, and the path of a file in it."""
    first, *parts = path.partition("://")[2].split("/")
    kind = {"datasets": "dataset", "spaces": "space", "models": "model"}.get(first)
    names = parts if kind else [first, *parts]
    name, _, revision = "/".join(names[:2]).partition("@")
    return {"repo_type": kind, "repo_id": name, "revision": revision or None, "path": "/".join(names[2:])}


@contextmanager
def _telling(path: str) -> Iterator[None]:
    """Make a StorageError of what the client raises, which is of no common class; a missing file is none."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except ImportError as error:
        message = f"{path}: hf:// needs the package huggingface_hub: pip install huggingface_hub"
        raise StorageError(message, path=path) from error
    except Exception as error:
        name, repository = type(error).__name__, _resolve(path)["repo_id"]
        if is_of_handler(error):
            raise
        if name in _MISSING_FILE:
            raise not_found(path) from error
        what = str(error).partition("\n")[0] or name
        remedy = "check the path, the network and the credentials (HF_TOKEN)"
        if name in _MISSING_REPOSITORY:
            what, remedy = f"there is no repository {repository!r}, or no access to it", "check the name and HF_TOKEN"
        raise StorageError(f"{path} could not be read: {what:.300}; {remedy}", path=path) from error
