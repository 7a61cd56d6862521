"""Holds the cheapest ratios by counting instructions, which no other work on the machine changes.

Run: ``python benchmarks/bench_instructions.py [--record]``. valgrind's callgrind runs this file
again, is switched on once all is imported, and writes its counters whenever
``sys.setrecursionlimit`` is called. Each function runs ``FEW`` times, then ``MANY`` times between
such calls, and the difference is free of what comes before and after them. System calls are counted
too; valgrind makes each reading of the clock one. With exit code 1 a bound does not hold.

verl's ``DistProfiler.annotate`` is the peer of a recorded stage
(``requirements/instructions.txt``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import bench_hooks
from results import record, row

from verl_profiling import ProfilingCallback
from verl_profiling.capture import stage_spans as stages
from verl_profiling.controller.decision import Decisions
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.run import Run
from verl_profiling.controller.watch import Watch
from verl_profiling.settings.config import ProfilingConfig

WARM_UP, FEW, MANY = 200, 200, 1_200
COUNTED = (
    "nullcontext",
    "idle stage",
    "hooks",
    "recorded stage, spans",
    "nobody asks",
    "recorded stage, torch",
    "recorded annotate, verl",
)


@dataclass(frozen=True)
class Count:
    """What one call costs."""

    instructions: float
    system_calls: float


@dataclass(frozen=True)
class Bound:
    """The most that one count may be of another; between 10% and 20% above what was found."""

    name: str
    counted: str
    of: str
    at_most: float


BOUNDS = (
    Bound("an idle stage of nullcontext", "idle stage", "nullcontext", 0.85),
    Bound("the four hooks of an unprofiled step of nullcontext", "hooks", "nullcontext", 3.7),
    Bound(
        "a step in which nobody asks for a capture of nullcontext",
        "nobody asks",
        "nullcontext",
        6.0,
    ),
    Bound("a recorded stage (spans) of nullcontext", "recorded stage, spans", "nullcontext", 2.85),
    Bound(
        "a recorded stage (torch) of verl's annotate",
        "recorded stage, torch",
        "recorded annotate, verl",
        0.2,
    ),
)
SYSTEM_CALLS = {"idle stage": 0, "hooks": 0, "recorded stage, spans": 2, "nobody asks": 5}
"""A recorded stage reads the clock twice, and nothing else. The loop lists one folder."""


def count(function: Callable[[], object]) -> None:
    """Call a function as often as the counters need it."""
    limit = sys.getrecursionlimit()
    for times in (WARM_UP, FEW, MANY):
        sys.setrecursionlimit(limit)
        for _ in range(times):
            function()
    sys.setrecursionlimit(limit)


def begin_counting() -> None:
    """Switch callgrind on: until then this process runs several times as fast.

    No stage is long from now on. By a slow machine's clock each may be, and then it reads the peak
    of memory.
    """
    stages.LONG_NS = 1 << 62
    subprocess.run(
        ["callgrind_control", "--instr=on", str(os.getpid())], check=True, capture_output=True
    )


def count_all() -> None:
    """Be the process whose instructions are counted."""
    verl = bench_hooks.verl_worker()
    begin_counting()
    count(bench_hooks.null)
    count(bench_hooks.ours)
    with tempfile.TemporaryDirectory() as folder:
        callback = ProfilingCallback(
            {"enable": True, "save_path": folder, "schedule": {"steps": [10**9]}}
        )
        count(lambda: bench_hooks.hooks_of_a_step(callback))
    with bench_hooks.recording("spans"):
        count(bench_hooks.ours)
    count_nobody_asks()
    if verl is not None:
        with bench_hooks.recording("torch"):
            count(bench_hooks.ours_decorated)
        verl.profiler.start(role="actor", profile_step="1")
        count(verl.annotated)
        verl.profiler.stop(run_command=False)


def count_nobody_asks() -> None:
    """Count what a step costs in which nobody asks for anything, and the folder is looked at."""
    settings = {"schedule": {"steps": []}, "watch": {"enable": True}}
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilingConfig.from_any({"enable": True, "save_path": folder, **settings})
        roster = Roster(config)
        decisions = Decisions(config, roster, Watch(config.watch, roster, 1.0))
        decisions.begin(Run(config))
        count(lambda: decisions.at(1, False))
        decisions.end([])


def counters(folder: Path) -> Iterator[Count]:
    """Yield what the process counted, function by function."""
    dumps = sorted(folder.glob("counts.*"), key=lambda path: int(path.suffix[1:]))
    totals = []
    for dump in dumps:
        found = re.search(r"^totals: (\d+)(?: (\d+))?", dump.read_text(), re.MULTILINE)
        totals.append((int(found[1]), int(found[2] or 0)) if found else (0, 0))
    # Three loops each, and before each function what leads up to it.
    for first in range(0, len(totals) - 3, 4):
        few, many = totals[first + 2], totals[first + 3]
        calls = MANY - FEW
        yield Count((many[0] - few[0]) / calls, (many[1] - few[1]) / calls)


def measured(script: str, at_least: int) -> list[Count]:
    """Run a script, which counts when told ``count``, under callgrind; return its counts in their
    order.

    Raises:
        SystemExit: Fewer were counted than there should be.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--collect-systime=yes",
            "--dump-before=Py_SetRecursionLimit",
            f"--callgrind-out-file={folder}/counts",
            *(sys.executable, script, "count"),
        ]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = list(counters(Path(folder)))
    if done.returncode or len(found) < at_least:
        raise SystemExit(
            f"{len(found)} functions were counted\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return found


def record_counts(found: dict[str, Count]) -> None:
    """Write the counts into the results."""
    against = {bound.counted: bound.of for bound in BOUNDS}
    rows = []
    for name, each in found.items():
        other = against.get(name, "") if against.get(name) in found else ""
        of = [found[other].instructions] if other else []
        rows.append(row(name, [each.instructions], "", against=other, of=of))
    record(
        "instructions",
        rows,
        method=f"Instructions of one call, of {MANY - FEW:,} under callgrind.",
        peers={bench_hooks.ANNOTATE: bench_hooks.VERL_SETUP},
    )


def main() -> int:
    """Print the counts and the bounds; return the exit code."""
    if shutil.which("valgrind") is None:
        print("SKIPPED: instructions are not counted, because valgrind is not installed")
        return 0
    counts = measured(__file__, COUNTED.index("recorded stage, torch"))
    found = dict(zip(COUNTED, counts, strict=False))
    for name, each in found.items():
        print(
            f"  {name:26}{each.instructions:10.0f} instructions {each.system_calls:6.2f} "
            "system calls"
        )
    verdicts = []
    for bound in BOUNDS:
        if not {bound.counted, bound.of} <= set(found):
            print(f"SKIPPED: {bound.name}: verl is not installed (make bench-instructions)")
            continue
        ratio = found[bound.counted].instructions / found[bound.of].instructions
        verdicts.append(
            (ratio <= bound.at_most, f"{bound.name}: {ratio:.3f}, at most {bound.at_most}")
        )
    for name, at_most in SYSTEM_CALLS.items():
        calls = found[name].system_calls
        verdicts.append(
            (calls <= at_most + 0.1, f"{name}: {calls:.2f} system calls, at most {at_most}")
        )
    for holds, text in verdicts:
        print(f"{'ok' if holds else 'BROKEN':7}{text}")
    if sys.argv[1:] == ["--record"]:
        record_counts(found)
    return int(not all(holds for holds, _ in verdicts))


if __name__ == "__main__":
    if sys.argv[1:] == ["count"]:
        count_all()
    else:
        sys.exit(main())
