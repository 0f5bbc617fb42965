"""What the figures should become: shown beside them, never a test."""

from tests.benchmarks.systems import BLOCKED, RESTORE, SAVE

_MSGPACK, _ORBAX = "ours, msgpack", "ours, orbax format"

# (kind of workload, operation, system) → (first goal, later goal)
GOALS = {
    ("large", SAVE, _MSGPACK): ("≥ 3x peer", "≥ 4x peer or ≤ 1.15x raw"),
    ("large", RESTORE, _MSGPACK): ("≥ 3x peer", "≥ 6x peer or ≤ 1.15x raw"),
    ("large", SAVE, _ORBAX): ("≥ 2.5x peer", "≥ 3x peer or ≤ 1.3x raw"),
    ("large", RESTORE, _ORBAX): ("", "≥ 3x peer or ≤ 1.3x raw"),
    ("large", BLOCKED, _MSGPACK): ("", "≤ 1.2x one copy"),
    ("large", BLOCKED, _ORBAX): ("", "≤ 1.2x one copy"),
    ("small", SAVE, _MSGPACK): ("≥ 1x peer", "≥ 1x peer"),
    ("small", RESTORE, _MSGPACK): ("≥ 1x peer", "≥ 1x peer"),
    ("small", SAVE, _ORBAX): ("≥ 20x peer", "≥ 40x peer"),
    ("small", RESTORE, _ORBAX): ("", "≥ 50x peer"),
}
MEMORY = "≤ 64 MiB"
FLAG = {"large": "≤ 1.5", "small": "≤ 4"}
