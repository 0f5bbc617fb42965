"""A run as files: results.json, which README's figures come from, and the page for people."""

import json
from typing import Any

from tests.benchmarks.lineup import SLOW_ROUNDS, SMALL_REPEATS
from tests.benchmarks.report import Table
from tests.benchmarks.series import Entry, Series
from tests.benchmarks.workloads import Workload

Results = dict[str, Any]
_HEAD = """\
# Benchmark results

`python -m tests.benchmarks --rounds {rounds} --write`. All systems of a table ran in the same process and the same
rounds, in an order of each round's own. On the small leaves all ran {small} rounds, but Orbax's interfaces up to
{slow}. Each save went to a fresh directory, and every restored leaf was compared bit by bit.

- *peer ÷ ours*: msgpack beside Flax's msgpack; Orbax's format beside the fastest of Orbax's interfaces in that table
  (Flax with the flag on, `PyTreeCheckpointer`, `StandardCheckpointer`, Orbax v1), which is named; both formats' saves
  in the background beside Orbax's fastest. safetensors and `np.savez` are shown only: they hold arrays, no checkpoint.
- *÷ limit*: how many times the machine's own limit it took. That is the faster of one thread and of one for each CPU
  that write and sync, or read into fresh memory, the same bytes as one file; for *blocked* it is one copy in memory.
- Ratios of systems that ran equally often are medians of the ratios within each round: the host of a virtual machine
  may slow down by half from one second to the next. All other ratios are those of medians.
- *synced*: what the kernel says of the files right after the save returned.
- *cold*: the files were synced and then put out of the page cache one by one (`posix_fadvise`) until the kernel said
  that nothing of them was in it. Where they lie on the disk was still known, and the host of a virtual machine may
  still have had the data. All other restores read from a warm page cache.
- *zstd*: with the setting `compression`. Orbax compresses so unless told otherwise, ours does not.
- *mapped*: with the setting `mapped`; *restore* is then the time before anything was touched.
- Flax's msgpack restores give numpy's arrays, and so do ours, also where the target's are on devices.
- GPT-2 small has 148 arrays in Flax: 12 in each of 12 layers, and 4.
"""


def collect(facts: dict[str, str], measured: list[tuple[Workload, Series]], peaks: list[Entry]) -> Results:
    """A whole run as plain data.

    Args:
        facts: of the machine.
        measured: the workloads with their figures.
        peaks: workload, operation, system, bytes.

    Returns:
        ``machine``, ``workloads`` (by name), ``seconds`` (see `Series.entries`), and ``peaks``.
    """
    return {
        "machine": facts,
        "workloads": {
            one.name: {"title": one.summary, "nbytes": one.nbytes, "leaves": one.leaves} for one, _ in measured
        },
        "seconds": [entry for workload, series in measured for entry in series.entries(workload.name)],
        "peaks": peaks,
    }


def as_text(results: Results) -> str:
    """JSON with an entry to a line, so that two runs can be compared line by line."""
    parts = []
    for name, part in results.items():
        if isinstance(part, list):
            lines = "".join(f"\n  {json.dumps(entry)}," for entry in part).removesuffix(",")
            parts.append(f' "{name}": [{lines}\n ]')
        else:
            lines = "".join(f"\n  {json.dumps(key)}: {json.dumps(value)}," for key, value in part.items())
            parts.append(f' "{name}": {{{lines.removesuffix(",")}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(facts: dict[str, str], rounds: int, tables: list[Table]) -> str:
    """RESULTS.md, without what other programs put there."""
    lines = [
        _HEAD.format(rounds=rounds, small=rounds * SMALL_REPEATS, slow=SLOW_ROUNDS),
        "| | |",
        "|---|---|",
        *(f"| {name} | {fact} |" for name, fact in facts.items()),
    ]
    return "\n".join([*lines, *(f"\n{table.markdown()}" for table in tables)]) + "\n"
