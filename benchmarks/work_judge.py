"""Holds what the report says of a slow rank, its data or its machine, against the ranks' CPU time.

Run: ``python benchmarks/work_judge.py [--runs N] [--rounds N]``. Three loops train a small FSDP2
model over gloo; see ``work_judge_ranks.py``. Lengths and the slow rank vary from round to round.

Truth is from the CPU time of the same sequences on two ranks, as cores of a shared machine are not
equally fast. The part of the data is by how much the slow rank's sequences take more CPU time than
the others', at the pace at which the others got through theirs. A step is right if its larger part
is named, or if the parts are within 25 points of the truth. Only sentences of the first screen are
judged: a step without one has nobody who is slow.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import results
from ranks import environments
from work_judge_ranks import LOOPS, run

from verl_profiling.analysis import open_step

KINDS = ("right", "wrong", "cannot tell", "nobody slow")
WITHIN = 0.25
WAYS = ("", "=work", "=longest-first")
"""Ways of ``what-if --balance update_actor`` that are held against steps that are balanced."""
FIRST_SEED = 200  # runs with the seeds before were looked at while the rule was written
STAGE = "update_actor"


class Facts(NamedTuple):
    """Times of each rank in a step (s).

    Attributes:
        step: Number of the step.
        plant: Planted reason of a slow rank.
        data_s: CPU time of its sequences, on all the ranks that they were given to.
        took_s: Time in which it ran, or waited for its core.
    """

    step: int
    plant: str
    data_s: list[float]
    took_s: list[float]


def run_loop(loop: str, seed: int, rounds: int, folder: Path) -> Iterator[Facts]:
    """Run a loop; yield the facts of its steps."""
    begin = multiprocessing.get_context("fork").Process
    where = environments(LOOPS[loop].ranks)
    ranks = [begin(target=run, args=(loop, folder, seed, rounds, each)) for each in where]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"a rank of {loop} failed")
    for path in sorted(folder.glob("facts*.json")):
        yield Facts(**json.loads(path.read_text()))


def judged(step: Path, facts: Facts) -> dict[str, Any]:
    """Return whether the report of a step is right about its slow rank, and what it says."""
    report = open_step(step).report()
    is_shown = any(finding.rule == "straggler" for finding in report.findings)
    rows = [row for row in report.stragglers if row.stage == STAGE]
    if not (is_shown and rows):
        return {"verdict": "nobody slow"}
    [row] = rows
    if row.data_us is None:
        return {"verdict": "cannot tell", "reason": row.fitted}
    slow = int(row.slowest.removeprefix("actor_rank"))
    data_s, took_s = (times[:slow] + times[slow + 1 :] for times in facts[2:])
    more_s = facts.data_s[slow] - fmean(data_s)
    true_us = 1e6 * more_s * sum(took_s) / sum(data_s)
    truth, said = (min(max(us / row.lead_us, 0.0), 1.0) for us in (true_us, row.data_us))
    is_right = (truth > 0.5) == (said > 0.5) or abs(truth - said) <= WITHIN
    return {"verdict": "right" if is_right else "wrong", "said": said, "truth": truth}


def judge(loop: str, seed: int, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for each step of a run, and one for each step that was balanced then."""
    rows, balanced = [], []
    with tempfile.TemporaryDirectory(prefix="work-judge-", ignore_cleanup_errors=True) as folder:
        for facts in run_loop(loop, seed, rounds, Path(folder)):
            found = judged(Path(folder, f"step_{facts.step:06d}"), facts)
            rows.append({"loop": loop, "planted": facts.plant, **found})
        for after in sorted(Path(folder).glob("step_*[37]")):
            step = open_step(after.with_name(f"step_{int(after.name[5:]) - 2:06d}"))
            times_s = [step.what_if().span_us / 1e6, open_step(after).what_if().span_us / 1e6]
            for way in WAYS:
                predicted = step.what_if(balance=[f"{STAGE}{way}"]).predicted_us / 1e6
                balanced.append({"loop": loop, "way": way, "times_s": [*times_s, predicted]})
    return rows, balanced


def markdown(found: dict[str, Any]) -> str:
    """Return the table, the misses, and where it was measured."""
    table = [
        "| loop | planted | " + " | ".join(KINDS) + " |",
        "|---|---" + "|---" * len(KINDS) + "|",
    ]
    rows, counts = found["rows"], Counter[str]()
    for loop, plant in sorted({(row["loop"], row["planted"]) for row in rows}):
        of_plant = Counter(
            row["verdict"] for row in rows if (row["loop"], row["planted"]) == (loop, plant)
        )
        counts += of_plant
        table.append(
            f"| {loop} | {plant} | " + " | ".join(str(of_plant[kind]) for kind in KINDS) + " |"
        )
    misses = [
        f"- {row['loop']}, {row['planted']}: data {row['said']:.0%}, by CPU time {row['truth']:.0%}"
        for row in rows
        if row["verdict"] == "wrong"
    ]
    slow = max(sum(counts[kind] for kind in KINDS[:3]), 1)
    shares = ", ".join(f"{counts[kind] / slow:.0%} {kind}" for kind in KINDS[:3])
    table += [
        "",
        f"{slow} steps with a slow rank: {shares}.{' Wrong:' * bool(misses)}",
        "",
        *misses,
    ]
    table += [
        "",
        "| loop | `--balance update_actor` | steps | would bring | brought |",
        "|---|---|---|---|---|",
    ]
    for loop in dict.fromkeys(row["loop"] for row in found["balanced"]):
        for way in WAYS:
            times = [
                row["times_s"]
                for row in found["balanced"]
                if (row["loop"], row["way"]) == (loop, way)
            ]
            before, after, predicted = map(sum, zip(*times, strict=True))
            gains = f"{1 - predicted / before:.0%} | {1 - after / before:.0%}"
            table.append(
                f"| {loop} | {f'`{way}`' if way else 'mean time'} | {len(times)} | {gains} |"
            )
    if "measured" in found:
        table += ["", f"{results.where(found['measured'])}."]
    return "\n".join(table)


def main() -> None:
    """Run the loops, keep what was found, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument(
        "--runs", type=int, default=10, help="runs of each loop (default: %(default)d)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of a run (default: %(default)d)"
    )
    given = parser.parse_args()
    found: dict[str, Any] = {"rows": [], "balanced": []}
    for seed in range(given.runs):
        for loop in LOOPS:
            rows, balanced = judge(loop, FIRST_SEED + seed, given.rounds)
            found["rows"] += rows
            found["balanced"] += balanced
            print(
                seed, Counter(row["verdict"] for row in found["rows"]), file=sys.stderr, flush=True
            )
    found["measured"] = results.here()
    results.write(Path(__file__).with_suffix(".json"), found)
    print(markdown(found))


if __name__ == "__main__":
    main()
