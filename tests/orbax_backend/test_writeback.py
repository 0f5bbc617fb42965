"""Telling the kernel early about files that TensorStore writes."""

import threading
import time
from pathlib import Path

import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import checksum_recording, ocdbt_writer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, length) of everything that the kernel was told."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(ocdbt_writer, "start_writeback", lambda _, offset, length: ranges.append((offset, length)))
    return ranges


@pytest.mark.parametrize("error", [None, ValueError("full"), TimeoutError("its own")])
def test_what_the_future_gives_comes_out(tmp_path: Path, error: Exception | None) -> None:
    """Also an error that looks like a wait that took too long."""
    promise, future = ts.Promise.new()

    def end() -> None:
        time.sleep(0.05)
        if error is None:
            promise.set_result(None)
        else:
            promise.set_exception(error)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        if error is None:
            ocdbt_writer.wait_with_writeback(future, str(tmp_path / "not there"))
        else:
            with pytest.raises(type(error), match=str(error)):
                ocdbt_writer.wait_with_writeback(future, str(tmp_path / "not there"))
    finally:
        thread.join()


def test_all_of_a_growing_file_is_told_once(tmp_path: Path, told: list[tuple[int, int]]) -> None:
    """Though it gets its name only when it is whole."""
    promise, future = ts.Promise.new()
    step, steps = 9 << 20, 4

    def grow() -> None:
        name = tmp_path / "data.__lock"
        with open(name, "wb") as file:
            for _ in range(steps):
                file.truncate(file.tell() + step)
                file.seek(step, 1)
                time.sleep(0.05)
        name.rename(tmp_path / "data")
        time.sleep(0.05)
        promise.set_result(None)

    thread = threading.Thread(target=grow)
    thread.start()
    ocdbt_writer.wait_with_writeback(future, str(tmp_path))
    thread.join()
    ends = [0, *(offset + length for offset, length in told)]
    assert [offset for offset, _ in told] == ends[:-1]
    assert ends[-1] == step * steps


def test_the_recorder_learns_that_all_bytes_are_in_files(tmp_path: Path) -> None:
    """Before the end, so that checksums are computed while the disk syncs, and not while bytes are missing."""
    promise, future = ts.Promise.new()
    sizes: list[int] = []

    class Recorder(checksum_recording.Recorder):
        def written(self) -> None:
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))

    def grow() -> None:
        for number in range(4):
            (tmp_path / str(number)).write_bytes(bytes(1000))
            time.sleep(0.03)
        while not sizes:
            time.sleep(0.01)
        promise.set_result(None)

    recorder, thread = Recorder(), threading.Thread(target=grow)
    recorder.add_bytes("a/0", bytes(2500))
    thread.start()
    ocdbt_writer.wait_with_writeback(future, str(tmp_path), recorder)
    thread.join()
    assert min(sizes) >= 2500


@pytest.mark.parametrize("can_sync", [True, False])
def test_tensorstore_syncs_what_it_writes(can_sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where directories can be synced; elsewhere it would fail, and the writer syncs the files."""
    monkeypatch.setattr(ocdbt_writer, "can_sync", lambda path: can_sync)
    assert ocdbt_writer.Database(str(tmp_path))._context.spec.to_json()["file_io_sync"] is can_sync
