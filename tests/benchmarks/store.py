"""How fast gs:// is beside its official client: ``python -m tests.benchmarks.store``, from the checkout.

The server runs on this machine and keeps everything in memory, so that neither a network nor a disk is measured. The
raw rows are `google-cloud-storage` with its transfer manager: files sent side by side, and one object in ranges.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import disk
from tests.benchmarks.report import Table
from tests.benchmarks.systems import timed
from tests.support import gs

GOAL = 1.3  # times the raw client
_ARRAYS, _WORKERS, _RANGE = 16, 8, 32 * 2**20
_RAW = ("raw client, threads", "raw client, processes")


def main(arguments: list[str] | None = None) -> None:
    """Runs it and prints the table; says what is missing where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.store", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of all arrays together (1024)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each system runs (5)")
    parser.add_argument("--workdir", help="where local copies go, before uploads and of raw downloads")
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(f"skipped: {why}")
        return
    with (
        tempfile.TemporaryDirectory(dir=options.workdir) as workdir,
        gs.server_alone({**os.environ, "GOGC": "25"}) as port,
    ):
        os.environ |= {
            "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": gs.TOKEN,
            "TMPDIR": workdir,
        }
        tempfile.tempdir = workdir
        print("; ".join(f"{name} {fact}" for name, fact in disk.machine_facts(workdir).items()))
        measure(port, options.mib, options.rounds, Path(workdir)).show()


def why_not() -> str | None:
    """Why it cannot run here; None where it can."""
    try:
        import google.cloud.storage  # noqa: F401
    except ImportError:
        return "google-cloud-storage is not installed: pip install google-cloud-storage"
    return gs.why_not()


def measure(port: int, mib: int, rounds: int, workdir: Path) -> Table:
    """Seconds of saves and restores, the systems in turn; what was restored is compared."""
    tree = {f"a{i:02}": np.random.default_rng(i).bytes(mib * 2**20 // _ARRAYS) for i in range(_ARRAYS)}
    arrays = {name: np.frombuffer(content, np.float32) for name, content in tree.items()}
    systems: dict[str, Any] = {f"ours, {format}": _Ours(port, format, arrays) for format in ("msgpack", "orbax")}
    bucket = gs.new_name(port)
    systems |= {name: _Raw(port, bucket, name.endswith("threads"), arrays, workdir / "raw") for name in _RAW}
    systems[_RAW[0]].send_whole()
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first loads what each system loads at its first call
        for name in list(systems) if number % 2 else list(reversed(systems)):
            for operation in ("save", "restore"):
                seconds.setdefault((name, operation), []).append(timed(getattr(systems[name], operation)))
            systems[name].check_and_remove()
    return _table({key: values[1:] for key, values in seconds.items()}, mib, list(systems))


def _table(seconds: dict[tuple[str, str], list[float]], mib: int, names: list[str]) -> Table:
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rows = []
    for name in names:
        row = [name]
        for operation in ("save", "restore"):
            best = min(median[raw, operation] for raw in _RAW)
            times = median[name, operation] / best
            verdict = "" if name in _RAW else "yes" if times <= GOAL else "no"
            row += [f"{median[name, operation]:.3f}", f"{times:.2f}", verdict]
        rows.append(tuple(row))
    columns = ("system", "save, median s", "÷ best raw", f"≤ {GOAL}", "restore, median s", "÷ best raw", f"≤ {GOAL} ")
    return Table(f"gs:// on a server of this machine, {_ARRAYS} arrays of {mib / _ARRAYS:g} MiB", columns, rows)


class _Ours:
    """This library, in one format."""

    def __init__(self, port: int, format: Any, arrays: dict[str, Any]) -> None:
        self._bucket, self._format, self._arrays = gs.new_name(port), format, arrays
        self._port, self._restored = port, dict[str, Any]()

    def save(self) -> None:
        """Saves to a new name."""
        import flax_ckpt_compat

        self._url = f"gs://{self._bucket}/{uuid.uuid4().hex}/c"
        flax_ckpt_compat.save(self._url, self._arrays, format=self._format)

    def restore(self) -> None:
        """Restores all of it."""
        import flax_ckpt_compat

        self._restored = flax_ckpt_compat.restore(self._url, self._arrays)

    def check_and_remove(self) -> None:
        """Compares, and frees the server's memory."""
        for name, array in self._arrays.items():
            np.testing.assert_array_equal(self._restored.pop(name), array)
        from flax_ckpt_compat._core.location import of_text

        location = of_text(self._url)
        assert not location.parent.discard([location.name])


class _Raw:
    """The official client: a file for each array is sent, and one object of all is fetched."""

    def __init__(self, port: int, bucket: str, in_threads: bool, arrays: dict[str, Any], workdir: Path) -> None:
        from google.auth.credentials import AnonymousCredentials  # type: ignore[import-untyped]
        from google.cloud import storage  # type: ignore[attr-defined]
        from google.cloud.storage import transfer_manager

        options = {"api_endpoint": f"http://127.0.0.1:{port}"}
        client = storage.Client("test", credentials=AnonymousCredentials(), client_options=options)
        self._bucket, self._manager = client.bucket(bucket), transfer_manager
        kind = transfer_manager.THREAD if in_threads else transfer_manager.PROCESS
        self._how = {"worker_type": kind, "max_workers": _WORKERS}
        self._arrays, self._from, self._to = arrays, workdir / "from", workdir / f"to-{kind}"
        self._from.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            (self._from / name).write_bytes(array.tobytes())
        self._whole = self._bucket.blob("whole")

    def send_whole(self) -> None:
        """Sends the object that all raw systems fetch."""
        content = b"".join(array.tobytes() for array in self._arrays.values())
        self._whole.upload_from_string(content, timeout=600)

    def save(self) -> None:
        """Sends the files, which are in the page cache."""
        failed = self._manager.upload_many_from_filenames(
            self._bucket, list(self._arrays), source_directory=str(self._from), **self._how
        )
        assert not any(failed), failed

    def restore(self) -> None:
        """Fetches the object to a file, in ranges."""
        self._manager.download_chunks_concurrently(self._whole, str(self._to), chunk_size=_RANGE, **self._how)

    def check_and_remove(self) -> None:
        """Compares, and removes the copy."""
        expected = np.concatenate(list(self._arrays.values())).view(np.uint8)
        np.testing.assert_array_equal(np.fromfile(self._to, np.uint8), expected)
        self._to.unlink()
        for name in self._arrays:
            self._bucket.blob(name).delete()


if __name__ == "__main__":
    main(sys.argv[1:])
