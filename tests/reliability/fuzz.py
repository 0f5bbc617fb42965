"""Restore files that are mutated at random, from a corpus of what each system writes: an error of ours, or a value."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator

from flax_ckpt_compat.errors import CheckpointError
from tests.reliability import damage, forks
from tests.reliability.extent import Extent
from tests.reliability.tally import Tally
from tests.reliability.workloads import SYSTEMS, System

_INPUTS = 500_000
_BATCH = 2_000
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


def fuzz(system: System, tally: Tally, extent: Extent) -> None:
    """Restore mutated checkpoints; each mutation also takes pieces of the other files of the corpus."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        writers = [one for one in SYSTEMS if one.orbax == system.orbax]
        for number, writer in enumerate(writers):
            forks.run(lambda number=number, writer=writer: damage.save(writer, f"{folder}/{number}", damage.small))
        left, seed = extent.times(_INPUTS, 20), 0
        while left > 0 and not extent.is_over:
            count = min(_BATCH, left)
            outcomes = damage.try_all(
                lambda count=count, seed=seed: _outcomes(system, folder, seed, count), folder, count
            )
            for number, outcome in enumerate(outcomes):
                tally.add(outcome, f"seed {seed}, input {number}")
            left, seed = left - len(outcomes), seed + 1


def _outcomes(system: System, folder: str, seed: int, count: int) -> Iterator[str]:
    system.use()
    signal.alarm(20)
    chance, corpus = random.Random(seed), _corpus(folder)
    names, run = sorted(corpus), f"{folder}/fuzzed-{seed}"
    for _ in range(count):
        name = chance.choice(names)
        source = os.path.join(folder, name.split("/")[0])
        copy = os.path.join(run, *name.split("/")[1:])
        if not os.path.isdir(run) or chance.random() < 0.01:
            shutil.rmtree(run, ignore_errors=True)
        if not os.path.exists(copy):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(source, run)
        with open(copy, "wb") as file:
            file.write(_mutated(corpus[name], corpus, chance))
        try:
            yield _outcome(system, run)
        finally:
            with open(copy, "wb") as file:
                file.write(corpus[name])
    shutil.rmtree(run, ignore_errors=True)


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


def _mutated(data: bytes, corpus: dict[str, bytes], chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at, size = chance.randrange(len(data) + 1), chance.choice((1, 2, 4, 8, 64))
        other = chance.choice(sorted(corpus.values()))
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
