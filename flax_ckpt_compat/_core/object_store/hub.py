"""Reach ``hf://``, repositories of Hugging Face, through its own package, which copies files to its local cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flax_ckpt_compat._core.byte_reads import Source
from flax_ckpt_compat._core.errors import CheckpointError, StorageError, is_of_handler
from flax_ckpt_compat._core.object_store.client import Client, imported
from flax_ckpt_compat._core.storage import Location, Stat
from flax_ckpt_compat._core.storage_errors import not_found

# An entry that is not in the local cache is no missing one, but a network that is.
_MISSING = ("FileNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError")


class HubClient(Client):
    """Requests to ``hf://organization/model[@revision]/path``, for reads alone."""

    access = "HF_TOKEN, the name and revision of the repository"

    def list(self, url: str) -> dict[str, Stat]:
        at, entries = _resolve(url), list[Any]()
        start = len(at["path"]) + 1 if at["path"] else 0
        with suppress(FileNotFoundError), self._telling(url):
            entries = [*_package(url).HfApi().list_repo_tree(recursive=True, path_in_repo=at.pop("path") or None, **at)]
        files = {one.path[start:]: Stat(one.size, one.blob_id) for one in entries if hasattr(one, "blob_id")}
        return dict(sorted(files.items()))

    def find(self, url: str) -> Stat | None:
        at = _resolve(url)
        with suppress(FileNotFoundError), self._telling(url):
            found = _package(url).HfApi().get_paths_info(paths=[name], **at) if (name := at.pop("path")) else []
            return next((Stat(one.size, one.blob_id) for one in found if hasattr(one, "blob_id")), None)
        return None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:  # noqa: ARG002
        return Location(self._local_copy(url)).read(start, stop)

    def open(self, url: str) -> Source:
        source = Location(self._local_copy(url)).open_file()
        source.path = url
        return source

    def _local_copy(self, url: str) -> str:
        at = _resolve(url)
        with self._telling(url):
            return str(_package(url).hf_hub_download(filename=at.pop("path"), **at))

    def prepare(self, url: str, *_: object) -> Any:
        raise StorageError(f"{url}: hf:// is only read; save to a disk or to another store, and upload that", path=url)

    write = delete = prepare  # type: ignore[assignment]

    @contextmanager
    def _telling(self, url: str) -> Iterator[None]:
        """Make a StorageError of what the hub's client raises, which is of no common class; a missing file is none."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CheckpointError) or is_of_handler(error):
                raise
            kind, name = type(error).__name__, _resolve(url)["repo_id"]
            lost = f"there is no repository {name!r} or revision, or no access to it: check the name and HF_TOKEN"
            remedy = lost if kind in ("RepositoryNotFoundError", "RevisionNotFoundError") else ""
            raise not_found(url) if kind in _MISSING else self.failure(error, url, "read", remedy) from error


def _package(url: str) -> Any:
    return imported(url, "huggingface_hub")


def _resolve(path: str) -> dict[str, Any]:
    """Return kind, name and revision of a repository, and the path of a file in it."""
    first, *parts = path.partition("://")[2].split("/")
    kind = {"datasets": "dataset", "spaces": "space", "models": "model"}.get(first)
    names = parts if kind else [first, *parts]
    name, _, revision = "/".join(names[:2]).partition("@")
    return {"repo_type": kind, "repo_id": name, "revision": revision or None, "path": "/".join(names[2:])}
