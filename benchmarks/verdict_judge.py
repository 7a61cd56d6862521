"""Holds what ``diff`` says of several runs a side against runs of one configuration, and against
runs whose steps are longer by a sleep.

Run: ``make verdict-judge``. Each loop starts ten times as it is; their spread is the standard
deviation of the medians of their steps. Then it starts ten times more with a sleep of 2.5 spreads
in each step. Sides of five runs are drawn from these; smaller changes are the runs as they are,
with a part of the sleep added to each step. More runs than there are come from drawing runs anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import results

from verl_profiling.commands.live_run import watched
from verl_profiling.report.verdict import interval, verdict_of

HERE = Path(__file__).parent
RESULTS = HERE / "verdict_judge.json"
SPREADS = 2.5  # of the planted change
SIDE = 5
DRAWS = 400
SPREAD_S = 0.05  # of simulated starts, whose steps take 1 s
MOST_MORE = 50  # more runs than this are not drawn

WATCHED = ("profiling=e2e", "profiling.schedule.steps=[]", "profiling.watch.enable=true")
TINY = ("steps=12", "batch.group_size=4", *WATCHED)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LOOPS = {
    "grpo_tiny": ((), ("recipes.grpo_tiny.train", "batch.prompts=8", *TINY)),
    "agent_tiny": (
        (),
        (
            *("recipes.agent_tiny.train", "batch.prompts=2", "agent.turns=2"),
            *("agent.cold_start_s=0.2", *TINY),
        ),
    ),
    "spmd_tiny": (TORCHRUN, ("recipes.spmd_tiny.train", "batch=20000", "steps=30", *WATCHED)),
}
Run = list[float]
"""Durations of the steps of a run (s)."""


def started(loop: str, sleep_s: float) -> Run:
    """Start a loop, and return the durations of its steps."""
    launcher, words = LOOPS[loop]
    with tempfile.TemporaryDirectory() as folder:
        program = (str(HERE / "verdict_loop.py"), f"{sleep_s:.6f}", words[0])
        command = [sys.executable, *launcher, *program, f"output_dir={folder}", *words[1:]]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command,
            env=environment,
            cwd=HERE.parent,
            check=True,
            timeout=600,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return [step.seconds for step in watched(Path(folder, "profiling"))[0]]


def is_told(before: Sequence[Run], after: Sequence[Run]) -> bool:
    """Return whether the interval of the change is on one side of 0."""
    ends = interval(list(map(median, before)), list(map(median, after)))
    return ends is not None and (ends[0] > 0 or ends[1] < 0)


def longer(runs: Sequence[Run], more_s: float) -> list[Run]:
    """Return the runs with longer steps."""
    return [[step_s + more_s for step_s in run] for run in runs]


def silent(runs: Sequence[Run]) -> float:
    """Return the share of the divisions of unchanged runs in which no change is told."""
    told = []
    for chosen in combinations(range(len(runs)), len(runs) // 2):
        before = [runs[at] for at in chosen]
        after = [run for at, run in enumerate(runs) if at not in chosen]
        told.append(is_told(before, after))
    return 1 - fmean(told)


def found(runs: Sequence[Run], slower: Sequence[Run], draw: random.Random) -> float:
    """Return the share of sides of five runs each in which the change is told."""
    return fmean(is_told(draw.sample(runs, SIDE), draw.sample(slower, SIDE)) for _ in range(DRAWS))


def found_later(start: Callable[[], Run], more_s: float, draws: int = DRAWS) -> tuple[float, str]:
    """Return the share of sides in which a change is told at once; and as text, of the others, in
    how many it is told with the runs that the verdict asks for.

    Args:
        start: Returns the steps of one more start.
        more_s: The change of each step.
        draws: Number of comparisons.
    """
    at_once = asked = told = 0
    for _ in range(draws):
        before = [start() for _ in range(SIDE)]
        after = longer([start() for _ in range(SIDE)], more_s)
        change_s = fmean(map(median, after)) - fmean(map(median, before))
        more = verdict_of(change_s, (before, after)).more_runs
        if more is None:
            at_once += 1
        elif more <= MOST_MORE:
            asked += 1
            before += [start() for _ in range(more)]
            after += longer([start() for _ in range(more)], more_s)
            told += is_told(before, after)
    later = f"{told} of {asked}, {draws - at_once - asked} need over {MOST_MORE}"
    return at_once / draws, later


def simulated(shape: str) -> list[str]:
    """Return the cells of starts that differ by chance, by one spread of a step of 1 s."""
    draw = random.Random(7)

    def start() -> Run:
        spreads = {
            "normal": draw.gauss(0, 1),
            "long tail": (draw.lognormvariate(0, 0.8) - 1.377) / 1.306,
            "two levels": draw.choice((-0.96, 0.96)) + draw.gauss(0, 0.29),
        }
        return [1 + SPREAD_S * (spreads[shape] + draw.gauss(0, 0.5)) for _ in range(12)]

    shares = [found_later(start, spreads * SPREAD_S) for spreads in (0.0, SPREADS, 1.0)]
    silent_share, found_share, (at_once, later) = 1 - shares[0][0], shares[1][0], shares[2]
    cells = [f"drawn: {shape}", "-", "1000 ms", f"{SPREAD_S:.1%}", "-", f"{silent_share:.0%}"]
    return [*cells, f"{found_share:.0%} ({SPREADS} spreads)", f"{at_once:.0%}", later]


def pairs(runs: Sequence[Run]) -> float:
    """Return the change of two starts that 19 of 20 pairs do not exceed, as a share."""
    medians = list(map(median, runs))
    changes = [max(pair) / min(pair) - 1 for pair in combinations(medians, 2)]
    return sorted(changes)[int(0.95 * len(changes))]


def row(loop: str, measured: dict[str, list[Run]], sleep_s: float) -> list[str]:
    """Return the cells of a loop."""
    runs, slower = measured["unchanged"], measured["slower"]
    draw = random.Random(7)
    step_s = fmean(map(median, runs))
    spread_s = stdev(map(median, runs))
    cells = [loop, f"{len(runs)} + {len(slower)}", f"{step_s * 1e3:.0f} ms"]
    cells += [f"{spread_s / step_s:.1%}", f"{pairs(runs):.0%}", f"{silent(runs):.0%}"]
    of_slower = "not run"
    if len(slower) >= SIDE:
        of_slower = f"{found(runs, slower, draw):.0%} ({sleep_s / spread_s:.1f} spreads)"
    at_once, later = found_later(lambda: draw.choice(runs), spread_s)
    return [*cells, of_slower, f"{at_once:.0%}", later]


def markdown(measured: dict[str, dict[str, list[Run]]], sleeps_s: dict[str, float]) -> str:
    """Return the table."""
    titles = (
        *("loop", "runs", "step", "spread", "19 of 20 pairs", "silent", "found"),
        *("a change of 1 spread", "with the runs asked for"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for loop, runs in measured.items():
        lines.append(f"| {' | '.join(row(loop, runs, sleeps_s.get(loop, 0.0)))} |")
    for shape in ("normal", "long tail", "two levels"):
        lines.append(f"| {' | '.join(simulated(shape))} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing in the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOOPS, default=[*LOOPS])
    parser.add_argument("--starts", type=int, default=10, help="of each kind")
    parser.add_argument("--again", action="store_true", help="measure anew")
    arguments = parser.parse_args()
    known: dict[str, Any] = {"measured": {}, "sleeps_s": {}}
    if RESULTS.exists() and not arguments.again:
        known = json.loads(RESULTS.read_text())
    for kind in ("unchanged", "slower"):
        for _ in range(arguments.starts):
            for loop in arguments.only:
                runs = known["measured"].setdefault(loop, {"unchanged": [], "slower": []})
                if len(runs[kind]) >= arguments.starts:
                    continue
                sleep_s = 0.0
                if kind == "slower":
                    spread_s = SPREADS * stdev(map(median, runs["unchanged"]))
                    sleep_s = known["sleeps_s"].setdefault(loop, round(spread_s, 6))
                runs[kind].append([round(step_s, 6) for step_s in started(loop, sleep_s)])
                known["machine"] = results.here()
                results.write(RESULTS, known)
    print(markdown(known["measured"], known["sleeps_s"]))


if __name__ == "__main__":
    main()
