"""Restore files that are mutated at random, from a corpus of what each system writes: an error of ours, or a value."""

import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat.errors import CheckpointError
from tests.reliability import damage, forks
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import SYSTEMS, System

_INPUTS = 500_000
_BATCH = 2_000
_SAME_WRITER = 100  # inputs made of one system's checkpoint: copying it takes longer than restoring it
_MANIFEST = b"\x0c\xdb\x3a\x2a"
_OCDBT = re.compile(re.escape(_MANIFEST) + b"|\x0c\xdb\x20\xde")
_SHORTEST = 18  # bytes of a manifest or node
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_TOKENS = (
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"null",
    b"[]",
    b"{}",
    b"-1",
)
_TOKENS += (b"1e999", b"\x94\x94\x94\x94", b"[" * 50, b"../../..", b"\x00" * 16, b'"x"', b"zlib", b"<f8", b"|O")

_crc32c = checksums.crc32c


def fuzz(system: System, tally: Tally, extent: Extent) -> None:
    """Restore mutated checkpoints; each mutation also takes pieces of the other files of the corpus."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        writers = [one for one in SYSTEMS if one.orbax == system.orbax]
        for number, writer in enumerate(writers):
            forks.run(lambda number=number, writer=writer: damage.save(writer, f"{folder}/{number}", damage.small))
        whole, first = extent.times(_INPUTS, 20), int(os.environ.get("RELIABILITY_SEED", "0"))
        batches = [(first + at // _BATCH, range(min(_BATCH, whole - at))) for at in range(0, whole, _BATCH)]
        for seed, numbers in batches:
            count = len(numbers)
            outcomes = damage.try_all(
                lambda seed=seed, count=count: _outcomes(system, folder, seed, count), folder, count
            )
            for number, outcome in enumerate(outcomes):
                tally.add(outcome, f"seed {seed}, input {number}")


def _outcomes(system: System, folder: str, seed: int, count: int) -> Iterator[str]:
    system.use()
    signal.alarm(damage._SECONDS)
    chance, corpus, run = random.Random(seed), _corpus(folder), f"{folder}/fuzzed-{seed}"
    pieces = sorted(corpus.values())
    for number in range(count):
        if number % _SAME_WRITER == 0:
            writer = chance.choice(sorted({name.split("/")[0] for name in corpus}))
            names = sorted(name for name in corpus if name.startswith(f"{writer}/"))
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(f"{folder}/{writer}", run)
        name = chance.choice(names)
        copy = os.path.join(run, *name.split("/")[1:])
        mutated = _mutated(corpus[name], pieces, chance)
        _write(copy, _sealed(mutated) if chance.random() < 0.5 else mutated)
        yield _outcome(system, run)
        _write(copy, corpus[name])
    shutil.rmtree(run, ignore_errors=True)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _sealed(data: bytes) -> bytes:
    """Return data in which the lengths and checksums of OCDBT's manifests and nodes are right again."""
    sealed = bytearray(data)
    for start in (found.start() for found in _OCDBT.finditer(data)):
        length = int.from_bytes(data[start + 4 : start + 12], "little")
        whole = start == 0 and data.startswith(_MANIFEST)  # alone in its file
        end = len(data) if whole or length > len(data) - start else start + length
        if end - start >= _SHORTEST:
            sealed[start + 4 : start + 12] = (end - start).to_bytes(8, "little")
            sealed[end - 4 : end] = _crc32c(sealed[start : end - 4]).to_bytes(4, "little")
    return bytes(sealed)


def _outcome(system: System, run: str) -> str:
    try:
        system.restore(run)
    except CheckpointError:
        return "found"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}" if system.is_ours else "found"
    return "value"


def _corpus(folder: str) -> dict[str, bytes]:
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            if re.match(r"\d+/", relative := os.path.relpath(path, folder)):
                with open(path, "rb") as file:
                    found[relative] = file.read()
    return found


def _mutated(data: bytes, pieces: list[bytes], chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at, size = chance.randrange(len(data) + 1), chance.choice((1, 2, 4, 8, 64))
        other = chance.choice(pieces)
        start = chance.randrange(len(other) + 1)
        number = chance.choice(_NUMBERS).to_bytes(8, "big")
        piece = chance.choice(
            (
                bytes([chance.randrange(256)]),
                chance.choice(_TOKENS),
                number[-chance.choice((1, 2, 4, 8)) :],
                other[start : start + chance.choice((1, 8, 64))],
                data[at : at + size] * chance.choice((2, 50)),
                b"",
            )
        )
        data = data[:at] + piece + data[at + chance.choice((0, len(piece), size)) :]
    return data
