"""Holds what the report says of a slow rank, its data or its machine, against the ranks' CPU time.

Run: ``python benchmarks/work_judge.py [--runs N] [--steps N]``. Loops of 2 and of 4 ranks train a
small FSDP2 model over gloo. Lengths and the slow rank vary from step to step: a rank gets more and
longer sequences, shares its core with a busy process, both, or nothing. Every step is captured.

Truth is from CPU times, which no busy process makes longer. The part of the data is the CPU time
of the slow rank in its micro-batches minus the others' mean, at the pace at which the others got
through theirs. Only sentences of the first screen are judged. A step is right if its larger part is
named, or if the parts are within 25 points of the truth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from ranks import environments

from verl_profiling.analysis import open_step

PROGRAM = Path(__file__).with_name("work_judge_ranks.py")
RANKS = (2, 4)
WITHIN = 0.25
STAGE = "update_actor"


def run_loop(ranks: int, seed: int, steps: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Run a loop; return the facts of each rank."""
    command = [sys.executable, str(PROGRAM), str(folder), str(seed), str(steps)]
    processes = [subprocess.Popen(command, env=where) for where in environments(ranks)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a rank failed")
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(ranks)]


def verdicts(folder: Path, facts: list[list[dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Yield what was planted in each captured step, and whether the report was right."""
    for of_ranks in zip(*facts, strict=True):
        step = folder / f"step_{of_ranks[0]['step']:06d}"
        if step.exists():
            yield of_ranks[0]["plant"], verdict(step, [fact["cpu_s"] for fact in of_ranks])


def verdict(step: Path, cpu_s: list[float]) -> str:
    """Return whether the report of a step is right about its slow rank."""
    report = open_step(step).report()
    shown = any(finding.rule == "straggler" for finding in report.findings)
    rows = [row for row in report.stragglers if row.stage == STAGE]
    if not (shown and rows):
        return "nobody slow"
    [row] = rows
    if row.data_us is None:
        return "cannot tell"
    slow = int(row.slowest.removeprefix("actor_rank"))
    others = fmean(cpu_s[:slow] + cpu_s[slow + 1 :])
    pace = (row.slowest_us - row.lead_us) / others
    truth = pace * (cpu_s[slow] - others) / row.lead_us
    truth, said = (min(max(share, 0.0), 1.0) for share in (truth, row.data_us / row.lead_us))
    is_right = (truth > 0.5) == (said > 0.5) or abs(truth - said) <= WITHIN
    print(f"{step.name}: data {said:.0%}, by CPU time {truth:.0%} of {row.lead_us / 1e3:.0f} ms")
    return "right" if is_right else "wrong"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    table: dict[tuple[int, str], Counter[str]] = {}
    for ranks in RANKS:
        for seed in range(arguments.runs):
            with tempfile.TemporaryDirectory() as folder:
                facts = run_loop(ranks, seed, arguments.steps, Path(folder))
                for plant, found in verdicts(Path(folder), facts):
                    table.setdefault((ranks, plant), Counter())[found] += 1
    kinds = ("right", "wrong", "cannot tell", "nobody slow")
    print("| ranks | planted |", " | ".join(kinds), "|")
    print("|---" * (2 + len(kinds)) + "|")
    for (ranks, plant), counts in sorted(table.items()):
        print(f"| {ranks} | {plant} |", " | ".join(str(counts[kind]) for kind in kinds), "|")


if __name__ == "__main__":
    main()
