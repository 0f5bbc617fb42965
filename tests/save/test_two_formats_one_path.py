"""Writers of both formats at one path: whatever one finds while the other replaces it, both save."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from flax_ckpt_compat import restore, save
from tests.support.saves import names, tree

FORMATS: tuple[Literal["msgpack", "orbax"], ...] = ("msgpack", "orbax")
Call = tuple[Any, str]


@pytest.mark.parametrize("mine", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("step", [None, 1])
def test_replaced_at_every_look_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, mine: Literal["msgpack", "orbax"], step: int | None
) -> None:
    """The other format takes the place before each listing or opening of the path in turn, and the save goes on."""
    target = tmp_path / "run" / "checkpoint_1"
    looks = listdir, opened = os.listdir, os.open
    left = 0

    def swap(path: Any) -> None:
        nonlocal left
        if str(path) != str(target) or left < 0:
            return
        left -= 1
        if left < 0:
            is_file = target.is_file()
            target.unlink() if is_file else shutil.rmtree(target)
            monkeypatch.undo()
            save(target, tree(2), format="orbax" if is_file else "msgpack")
            patch()

    def patch() -> None:
        monkeypatch.setattr(os, "listdir", lambda path=".": (swap(path), listdir(path))[1])
        monkeypatch.setattr(os, "open", lambda path, *args, **kwargs: (swap(path), opened(path, *args, **kwargs))[1])

    for count in range(100):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        save(target, tree(1), format=first)  # type: ignore[arg-type]
        left = count
        patch()
        save(target if step is None else target.parent, tree(3), step=step, overwrite=True, format=mine)
        monkeypatch.undo()
        assert restore(target)["n"] in (2, 3)  # 2 where the swap came after the commit
        assert names(target.parent) == ["checkpoint_1"]
        if left >= 0:
            break
    assert count > 1 and left >= 0 and looks == (os.listdir, os.open)


def test_threads(tmp_path: Path) -> None:
    """Real threads of both formats; every save succeeds, and what stays is one whole checkpoint."""
    outcomes: Counter[str] = Counter()

    def write(format: Literal["msgpack", "orbax"]) -> None:
        for _ in range(6):
            try:
                save(tmp_path, tree(1), step=1, overwrite=True, format=format)
                outcomes["ok"] += 1
            except BaseException as error:
                outcomes[repr(error)] += 1

    threads = [threading.Thread(target=write, args=(format,)) for format in FORMATS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"ok": 24}
    assert names(tmp_path) == ["checkpoint_1"]
    assert restore(tmp_path)["n"] == 1
