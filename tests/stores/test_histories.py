"""Histories of two writers, a remover and a reader of one step, of which any request fails, is lost, or is the last.

The store is a dictionary with conditions, so that a seed is a history: the second actor acts whole, or up to its own
end, between two requests of the first one.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat._core.object_store import commit, storage, upload
from flax_ckpt_compat._core.object_store.client import ABSENT, Client, ConflictError
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, MANIFEST
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.storage_errors import not_found
from flax_ckpt_compat.errors import CheckpointError, ConcurrentWriteError, StorageError

URL = "gs://bucket/run/checkpoint_1"
STATES = ("msgpack", "orbax", "other")  # formats; "other" is Orbax's of another tree


class Killed(BaseException):
    """The writer is dead."""


class Memory(Client):
    """Objects in memory.

    Attributes:
        objects: key → content and version.
        hook: called before each request; it returns what to raise after it, or raises.
        by_content: equal bytes are one version, as on ``s3://``.
    """

    def __init__(self, *, needs_commit_file: bool, by_content: bool) -> None:
        self.needs_commit_file, self.by_content = needs_commit_file, by_content  # type: ignore[misc]
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.hook: Callable[[], BaseException | None] = lambda: None
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    @contextmanager
    def _request(self) -> Iterator[None]:
        lost = self.hook()
        with self._lock:
            yield
        if lost is not None:
            raise lost

    def _found(self, url: str) -> tuple[bytes, str]:
        if (found := self.objects.get(url)) is None:
            raise not_found(url)
        return found

    def _check(self, url: str, version: str | None) -> None:
        if version is not None and self.objects.get(url, (b"", ABSENT))[1] != version:
            raise ConflictError(url)

    def list(self, url: str) -> dict[str, Stat]:
        with self._request():
            inside = {key: found for key, found in sorted(self.objects.items()) if key.startswith(f"{url}/")}
            return {key[len(url) + 1 :]: Stat(len(data), version) for key, (data, version) in inside.items()}

    def find(self, url: str) -> Stat | None:
        with self._request():
            data, version = self.objects.get(url, (b"", ABSENT))
            return Stat(len(data), version) if version else None

    def read_there(self, url: str, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        with self._request():
            found = self._found(url)[0][start:stop]
            self._check(url, version)
            return found, None

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:
        data = file.read()
        with self._request():
            self._check(url, version)
            new = hashlib.md5(data).hexdigest() if self.by_content else str(next(self._numbers))
            self.objects[url] = data, new
            return new

    def delete(self, url: str, version: str | None = None) -> bool:
        with self._request():
            if url not in self.objects or version not in (None, self.objects[url][1]):
                return False
            del self.objects[url]
            return True


def tree(number: int, kind: str) -> dict[str, Any]:
    """A tree of which every value tells the save."""
    more = {"more": np.full(5, number)} if kind == "other" else {}
    return {"n": number, "small": np.full(3, number), "large": np.full(3000, number, np.float32), **more}


def number_of(found: Any) -> int:
    """The save that a tree is from; all of it is from one."""
    held = {int(value) for leaf in found.values() for value in np.unique(np.asarray(leaf))}
    assert len(held) == 1, found
    return held.pop()


def save(number: int, kind: str, *, overwrite: bool = True) -> None:
    """Saves a tree as the only step."""
    format: Any = "msgpack" if kind == "msgpack" else "orbax"
    flax_ckpt_compat.save(URL, tree(number, kind), format=format, overwrite=overwrite)


def restored() -> int | None:
    """The save that restores; None if nothing whole is there, which names itself."""
    try:
        return number_of(flax_ckpt_compat.restore(URL))
    except (flax_ckpt_compat.errors.IncompleteCheckpointError, flax_ckpt_compat.errors.CheckpointNotFoundError):
        return None


class History:
    """What one seed stands for."""

    def __init__(self, seed: int, store: Memory):
        self.draw, self.store, self.ended = random.Random(seed), store, dict[str, str]()

    def run(self) -> None:
        """Let two actors act on what an earlier one left, and judge what there is."""
        self.before = None
        if self.draw.random() < 0.8:
            save(1, self.draw.choice(STATES))
            self.before = 1
        self._act("first", 2, at=self.draw.randrange(30), meets=self.draw.random() < 0.8)
        self.store.hook = lambda: None
        self._judge()

    def _act(self, name: str, number: int, *, at: int, meets: bool) -> None:
        """Save, or remove, with something between its requests from one on."""
        fault = self.draw.choice(["", "", "killed", "refused", "lost"])
        count, outer, dead = itertools.count(), self.store.hook, list[bool]()

        def hook() -> BaseException | None:
            n = next(count)
            if dead:
                raise Killed
            if n == at and meets:
                self._act("second", 3, at=self.draw.randrange(30), meets=False)
                self.store.hook = hook
            if n < at or not fault or (n > at and fault != "killed"):
                return None
            if fault == "killed":
                dead.append(True)
                raise Killed
            if fault == "refused":
                raise StorageError("refused")
            return StorageError("lost")

        self.store.hook = hook
        kind = self.draw.choice([*STATES, "remove"] if name == "second" else STATES)
        self.ended[name] = "ok"
        try:
            if kind == "remove":
                self.ended[name] = "removed"
                commit.remove(URL)
            else:
                save(number, kind, overwrite=self.draw.random() < 0.7)
        except flax_ckpt_compat.errors.CleanupError:
            pass
        except (CheckpointError, ValueError) as error:
            self.ended[name] = f"failed {type(error).__name__}"
        except Killed:
            self.ended[name] = "killed"
        self.store.hook = outer

    def _judge(self) -> None:
        found, ended = restored(), self.ended
        whole = {number for name, number in (("first", 2), ("second", 3)) if ended.get(name) == "ok"}
        clean = all(end in ("ok", "removed") or "Invalid" in end or "Concurrent" in end for end in ended.values())
        allowed = {1, 2, 3, None}
        if clean and whole and "removed" not in ended.values():
            allowed = {*whole}
        elif clean and not whole and "removed" not in ended.values():
            allowed = {self.before}
        assert found in allowed, (found, allowed, ended, sorted(self.store.objects))
        try:
            save(9, self.draw.choice(STATES))
        except flax_ckpt_compat.errors.InvalidCheckpointError:
            # One that dies just after another has removed its mark leaves a file that nothing tells from a user's.
            assert "killed" in ended.values() and len(ended) > 1, ended
            return
        assert restored() == 9
        assert not [key for key in self.store.objects if "_begun" in key]
        assert len({key.split("/")[4] for key in self.store.objects}) <= 1


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_step_that_is_being_removed(is_saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remover lists a folder whose commit file its writer has taken: its writer hears of that, or has saved it."""
    store, found = Memory(needs_commit_file=True, by_content=False), dict[str, Stat]()
    monkeypatch.setitem(commit.CLIENTS, "gs", store)
    save(1, "orbax")

    def write(url: str, *rest: Any) -> str:
        if url.endswith(MANIFEST):
            found.update(store.list(URL))
        if url.endswith(COMMIT_FILE) and not is_saved:
            commit.remove_folder(URL, found)
        return Memory.write(store, url, *rest)

    monkeypatch.setattr(store, "write", write)
    if is_saved:
        save(2, "other")
        commit.remove_folder(URL, found)
    else:
        with pytest.raises(ConcurrentWriteError):
            save(2, "other")
    assert restored() == (2 if is_saved else None)


def serially(function: Callable[[Any], Any], items: Any, *_: Any) -> list[Any]:
    """In the place of threads, whose order no seed decides."""
    return [function(item) for item in items]


def run(seeds: Iterable[int], patch: pytest.MonkeyPatch) -> None:
    """Run histories on stores of both kinds."""
    patch.setattr(upload, "_PAUSE", 0.0)
    for module in (commit, storage, upload):
        patch.setattr(module, "in_parallel", serially)
    for seed in seeds:
        store = Memory(needs_commit_file=seed % 2 == 0, by_content=seed % 2 == 1)
        patch.setitem(commit.CLIENTS, "gs", store)
        try:
            History(seed, store).run()
        except BaseException:
            print(f"seed {seed}")
            raise


@pytest.mark.slow
def test_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and nothing is mixed."""
    run([*range(30), 1795788043, 920000138], monkeypatch)


@pytest.mark.slow
def test_fresh_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with seeds of the day."""
    first = int(time.time()) // 86400 * 10_000
    run(range(first, first + 2000), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("needs_commit_file", [False, True])
def test_one_of_two_at_once_is_saved(needs_commit_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers replace a step by another tree: what is there then is one of the two, whole, and that one says so."""
    for seed in range(2):
        store, draw = Memory(needs_commit_file=needs_commit_file, by_content=seed % 2 == 1), random.Random(seed)
        monkeypatch.setitem(commit.CLIENTS, "gs", store)
        save(1, "orbax")
        store.hook = lambda draw=draw: time.sleep(draw.uniform(0, 0.01))  # type: ignore[misc]
        saved = list[int]()

        def write(number: int, delay: float, saved: list[int] = saved) -> None:
            time.sleep(delay)
            with suppress(ConcurrentWriteError):
                save(number, "other")
                saved.append(number)

        writers = [threading.Thread(target=write, args=(number, draw.uniform(0, 0.05))) for number in (2, 3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        store.hook = lambda: None
        assert restored() in saved, (seed, saved, sorted(store.objects))
