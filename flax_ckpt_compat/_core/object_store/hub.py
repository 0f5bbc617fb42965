"""Reach ``hf://``, repositories of Hugging Face, through its own package, which copies files to its local cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from flax_ckpt_compat._core.errors import CheckpointError, StorageError, is_of_handler
from flax_ckpt_compat._core.object_store.client import Client
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Location, Stat
from flax_ckpt_compat._core.storage_errors import not_found

_MISSING_FILE = ("FileNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError")  # no cached one is no network
_MISSING_REPOSITORY = ("RepositoryNotFoundError", "RevisionNotFoundError")


class HubClient(Client):
    """Requests to ``hf://organization/model[@revision]/path``, for reads alone."""

    def list(self, url: str) -> dict[str, Stat]:
        at = _resolve(url)
        prefix = at.pop("path")
        entries, start = list[Any](), len(prefix) + 1 if prefix else 0
        with suppress(FileNotFoundError), _telling(url):
            entries = [*_api().list_repo_tree(recursive=True, path_in_repo=prefix or None, **at)]
        files = {one.path[start:]: Stat(one.size, one.blob_id) for one in entries if hasattr(one, "blob_id")}
        return dict(sorted(files.items()))

    def find(self, url: str) -> Stat | None:
        at = _resolve(url)
        name = at.pop("path")
        with suppress(FileNotFoundError), _telling(url):
            found = _api().get_paths_info(paths=[name], **at) if name else []
            return next((Stat(one.size, one.blob_id) for one in found if hasattr(one, "blob_id")), None)
        return None

    def read_there(self, url: str, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:  # noqa: ARG002
        return Location(self.local_copy(url)).read(start, stop), None

    def local_copy(self, url: str) -> str:
        import huggingface_hub

        with _telling(url):
            at = _resolve(url)
            return str(huggingface_hub.hf_hub_download(filename=at.pop("path"), **at))

    def prepare(self, url: str) -> None:
        raise StorageError(f"{url}: hf:// is only read; save to a disk or to another store, and upload that", path=url)

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:  # noqa: ARG002
        self.prepare(url)
        return ""

    def delete(self, url: str, version: str | None = None) -> bool:  # noqa: ARG002
        self.prepare(url)
        return False


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
    except CheckpointError:
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
