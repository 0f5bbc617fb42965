"""Histories of two writers, or of one and a remover of its step, of which any request fails, is lost, or is the last.

The store is a dictionary with conditions, and a seed draws whose request is next.
"""

import functools
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
from flax_ckpt_compat._core.errors import not_found
from flax_ckpt_compat._core.local import atomic, presence
from flax_ckpt_compat._core.object_store import commit, storage
from flax_ckpt_compat._core.object_store.client import ABSENT, Client, replaced
from flax_ckpt_compat._core.orbax_layout import COMMIT_FILE, MANIFEST, PROCESS_PREFIX
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Stat
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
            raise replaced(url)

    def list(self, url: str) -> dict[str, Stat]:
        with self._request():
            inside = {key: found for key, found in sorted(self.objects.items()) if key.startswith(f"{url}/")}
            return {key[len(url) + 1 :]: Stat(len(data), version) for key, (data, version) in inside.items()}

    def find(self, url: str) -> Stat | None:
        with self._request():
            data, version = self.objects.get(url, (b"", ABSENT))
            return Stat(len(data), version) if version else None

    def read(self, url: str, start: int = 0, stop: int | None = None, version: str | None = None) -> bytes:
        with self._request():
            found = self._found(url)[0][start:stop]
            self._check(url, version)
            return found

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


def save(number: int, kind: str, *, overwrite: bool = True, shared: bool = False) -> None:
    """Saves a tree as the only step; a ``shared`` one in Orbax's format as process 0 of two."""
    format: Any = "msgpack" if kind == "msgpack" else "orbax"
    _own.is_shared = shared
    flax_ckpt_compat.save(URL, tree(number, kind), format=format, overwrite=overwrite)


_own, _publish = threading.local(), storage.ObjectLocation.publish


def publish(location: storage.ObjectLocation, temporary: str, **options: Any) -> None:
    """In the place of the method: saves of this thread that are shared have a part of process 1, which has no array."""
    if not (_own.is_shared and presence.isdir(temporary)):
        _publish(location, temporary, **options)
        return
    upload = commit.Upload(location.path)
    upload.begin()
    try:
        upload.write(f"{PROCESS_PREFIX}1{upload.tag}/d/part", b"")
    except BaseException:
        upload.abort()
        raise
    upload.publish(temporary, **options)
    atomic.remove_temporary(temporary)


def restored() -> int | None:
    """The save that restores; None if nothing whole is there, which names itself."""
    try:
        return number_of(flax_ckpt_compat.restore(URL))
    except (flax_ckpt_compat.errors.IncompleteCheckpointError, flax_ckpt_compat.errors.CheckpointNotFoundError):
        return None


class Turns:
    """Threads of which one at a time sends a request, as a seed draws; without threads, all are answered."""

    def __init__(self, draw: random.Random):
        self._draw, self._stay = draw, draw.choice([0.3, 0.6, 0.85, 0.95])
        self._changed, self._own, self._turn, self._last = threading.Condition(), threading.local(), -1, -1
        self._running, self._waiting = set[int](), set[int]()

    def run(self, actors: list[Callable[[], None]]) -> None:
        """Let them act until all have ended."""

        def act(number: int) -> None:
            self._own.number = number
            actors[number]()
            with self._changed:
                self._running.discard(number)
                self._choose()

        threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(len(actors))]
        self._running.update(range(len(actors)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def take(self) -> int | None:
        """Wait for this thread's turn; return the number of its actor."""
        number: int | None = getattr(self._own, "number", None)
        if number is not None:
            with self._changed:
                self._waiting.add(number)
                self._choose()
                self._changed.wait_for(lambda: self._turn == number)
                self._waiting.discard(number)
                self._turn = -1
        return number

    def _choose(self) -> None:
        if self._turn == -1 and self._running and self._waiting == self._running:
            stays = self._last in self._waiting and self._draw.random() < self._stay
            self._turn = self._last = self._last if stays else self._draw.choice(sorted(self._waiting))
            self._changed.notify_all()


def history(seed: int, store: Memory, share: float) -> None:
    """Let two actors act on what an earlier save left, of which one may fail or die, and judge what there is."""
    draw, drawn = random.Random(seed), random.Random(f"{seed} shared")
    before = 1 if draw.random() < 0.8 else None
    if before:
        save(1, draw.choice(STATES))
    turns, fault, at = Turns(draw), draw.choice(["", "", "", "killed", "refused", "lost"]), draw.randrange(25)
    plans = [(draw.choice(kinds), draw.random() < 0.75) for kinds in (STATES, (*STATES, "remove"))]
    ended, counts, faulty = [""] * len(plans), [0] * len(plans), draw.randrange(len(plans))
    shared = [drawn.random() < share for _ in plans]

    def hook() -> BaseException | None:
        if (number := turns.take()) is None:
            return None
        counts[number] += 1
        if number != faulty or not fault or counts[number] <= at or (counts[number] > at + 1 and fault != "killed"):
            return None
        if fault == "lost":
            return StorageError("lost")
        raise StorageError("refused") if fault == "refused" else Killed

    def act(number: int) -> None:
        kind, overwrite = plans[number]
        try:
            if kind == "remove":
                commit.remove(URL)
            else:
                save(number + 2, kind, overwrite=overwrite, shared=shared[number])
            ended[number] = "removed" if kind == "remove" else "ok"
        except flax_ckpt_compat.errors.CleanupError:
            ended[number] = "ok"
        except (CheckpointError, ValueError) as error:
            ended[number] = f"failed {type(error).__name__}"
        except Killed:
            ended[number] = "killed"

    store.hook = hook
    turns.run([functools.partial(act, number) for number in range(len(plans))])
    store.hook = lambda: None
    assert "failed ConflictError" not in ended, "of what another one replaced meanwhile, a save says so"
    found, saved = restored(), {number + 2 for number, end in enumerate(ended) if end == "ok"}
    assert any(overwrite for _, overwrite in plans) or len(saved) < 2, "one has replaced the other's new checkpoint"
    allowed: set[int | None] = {1, 2, 3, None}
    if all(end in ("ok", "removed") or "Invalid" in end or "Concurrent" in end for end in ended):
        allowed = {*saved, None} if "removed" in ended else {*saved} or {before}
    assert found in allowed, (found, allowed, plans, ended, sorted(store.objects))
    try:
        save(9, draw.choice(STATES))
    except flax_ckpt_compat.errors.InvalidCheckpointError:
        # One that dies, or may not clean up, after another has removed its mark leaves files that nothing tells from
        # a user's, and so does one that writes while a remover removes its mark.
        assert fault or "removed" in ended, (plans, ended)
        return
    assert restored() == 9
    assert not [key for key in store.objects if "_begun" in key or PROCESS_PREFIX in key]
    assert len({key.split("/")[4] for key in store.objects}) <= 1


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The store of the URL."""
    store = Memory(needs_commit_file=True, by_content=False)
    monkeypatch.setitem(commit.CLIENTS, "gs", store)
    return store


@pytest.mark.parametrize(("kind", "overwrite", "name"), [("msgpack", False, ""), ("other", True, f"/{MANIFEST}")])
def test_another_writer_comes_first(kind: str, overwrite: bool, name: str, store: Memory, monkeypatch: Any) -> None:
    """What it has written since the look stays: the loser replaces no file of another version than it has found."""
    if overwrite:
        save(1, "orbax")

    def write(url: str, *rest: Any) -> str:
        if url == URL + name:
            store.objects[url] = b"of another", "another"
            if overwrite:
                store.objects[f"{URL}/{commit.new_marker(2**40)}"] = b"", "another"
        return Memory.write(store, url, *rest)

    monkeypatch.setattr(store, "write", write)
    with pytest.raises(ConcurrentWriteError):
        save(2, kind, overwrite=overwrite)
    assert store.objects[URL + name][0] == b"of another"


def test_a_remover_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever request, what it leaves is whole, or names itself unfinished, so that the next save replaces it."""
    monkeypatch.setattr(commit, "in_parallel", serially)
    left = list[int | None]()
    for at in range(20):
        store = Memory(needs_commit_file=False, by_content=False)  # what is not marked counts as a copy
        monkeypatch.setitem(commit.CLIENTS, "gs", store)
        save(1, "orbax")
        requests = iter(range(at))

        def hook(requests: Any = requests) -> None:
            if next(requests, None) is None:
                raise Killed

        store.hook = hook
        with suppress(Killed):
            commit.remove(URL)
        store.hook = lambda: None
        left.append(restored())
        save(9, "orbax")
        assert restored() == 9
    gone = left.index(None)
    assert gone and left == [1] * gone + [None] * (20 - gone)  # it does not come back


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_step_that_is_being_removed(is_saved: bool, store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remover lists a folder whose commit file its writer has taken: its writer hears of that, or has saved it."""
    found = dict[str, Stat]()
    save(1, "orbax")

    def write(url: str, *rest: Any) -> str:
        if url.endswith(MANIFEST):
            found.update(store.list(URL))
        if url.endswith(COMMIT_FILE) and not is_saved:
            commit.delete(URL, gone := commit.uncommit(URL, found) or {}, commit.versions_of(gone))
        return Memory.write(store, url, *rest)

    monkeypatch.setattr(store, "write", write)
    if is_saved:
        save(2, "other")
        commit.delete(URL, gone := commit.uncommit(URL, found) or {}, commit.versions_of(gone))
    else:
        with pytest.raises(ConcurrentWriteError):
            save(2, "other")
    assert restored() == (2 if is_saved else None)


@pytest.mark.parametrize("kind", ["msgpack", "orbax"])
def test_who_gives_up_for_a_commit(kind: str, store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new save begins just before another one is committed, and gives up: the other does not, for its mark."""
    save(1, "orbax")
    asked = list[Any]()

    def write(url: str, *rest: Any) -> str:
        if url.endswith(COMMIT_FILE) and not asked:
            asked.append((url, *rest))
            with pytest.raises(ConcurrentWriteError):
                save(3, kind, overwrite=False)
            return str(asked[1])
        version = Memory.write(store, url, *rest)
        if len(asked) == 1 and "_begun" in url:
            asked.append(Memory.write(store, *asked[0]))
        return version

    monkeypatch.setattr(store, "write", write)
    monkeypatch.setattr(store, "delete", lambda url, *rest: "_begun" not in url and Memory.delete(store, url, *rest))
    save(2, "other")
    assert restored() == 2
    # A third one, whose mark its writer may find, makes it withdraw: nobody gives up for that.
    there = {**store.list(URL), commit.new_marker(2**40): Stat(0, "")}
    assert not commit._confirm_commit(URL, there, commit.new_marker(2**41))
    assert store.list(URL)[COMMIT_FILE] == there[COMMIT_FILE]


def test_what_is_sent_while_a_save_is_aborted(store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes, too: its process found the mark of the save just before that went."""
    upload = commit.Upload(URL)
    upload.begin()

    def delete(url: str, version: str | None = None) -> bool:
        if url.endswith(upload.marker):
            store.objects[f"{URL}/{PROCESS_PREFIX}1{upload.tag}/d/late"] = b"", "late"
        return Memory.delete(store, url, version)

    monkeypatch.setattr(store, "delete", delete)
    upload.abort()
    assert not store.objects


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_the_same_tree_again(order: int, shared: bool, store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two requests, in either order of those at once, a reader finds the old or the new step, whole.

    So does one who comes after a writer that died there.
    """
    monkeypatch.setattr(commit, "in_parallel", lambda function, items, _: serially(function, [*items][::order]))
    monkeypatch.setattr(storage.ObjectLocation, "publish", publish)
    found = list[int | None]()
    save(1, "orbax")

    def look() -> None:
        store.hook = lambda: None
        found.append(restored())
        store.hook = look

    store.hook = look
    save(2, "orbax", shared=shared)
    assert found == [1] * found.count(1) + [2] * found.count(2) and set(found) == {1, 2}


def serially(function: Callable[[Any], Any], items: Any, *_: Any, order: random.Random | None = None) -> list[Any]:
    """In the place of threads, whose order no seed decides; in a drawn order."""
    items = list(items)
    return [function(item) for item in (order.sample(items, len(items)) if order else items)]


def run(seeds: Iterable[int], patch: pytest.MonkeyPatch, share: float = 0.3) -> None:
    """Run histories on stores of both kinds; ``share`` of the writers have several processes."""
    patch.setattr(commit, "_PAUSE", 0.0)
    patch.setattr(storage.ObjectLocation, "publish", publish)
    order = random.Random()
    for module in (commit, storage):
        patch.setattr(module, "in_parallel", functools.partial(serially, order=order if share else None))
    for seed in seeds:
        order.seed(seed)
        store = Memory(needs_commit_file=seed % 2 == 0, by_content=seed // 2 % 2 == 1)
        patch.setitem(commit.CLIENTS, "gs", store)
        try:
            history(seed, store, share)
        except BaseException:
            print(f"seed {seed}")
            raise


def test_histories_that_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that lost both of two saves, one acknowledged or new, left a folder that refused the next, or gave up."""
    run([182, 601161, 700355, 900957, 910256, 83000215], monkeypatch, share=0)
    run([63000653], monkeypatch)


@pytest.mark.slow
def test_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and nothing is mixed, with seeds of the day, too."""
    first = int(time.time()) // 86400 * 10_000
    run([*range(100), *range(first, first + 600)], monkeypatch)
