"""Intervals for other resources held against real runs, as ``what_if_judge.py`` does for other
changes.

Run: ``make what-if-judge``. Each run is a program of its own, ``what_if_engine_loop.py``, with five
captured steps. An interval has the medians of the ends that the steps of A give. One run A serves
all pairs of a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import ray
import results
from what_if_judge import Pair, call, error

from verl_profiling.analysis import CapturedStep, open_run

__all__ = ["PLANS", "all_pairs", "markdown"]

RESULTS = Path(__file__).with_name("what_if_resources.json")
OPTIONS = ("--async 1", "--replicas")


def lengths(seed: int, count: int, least: int, most: int) -> list[int]:
    """Return the recorded lengths of a workload."""
    drawn = random.Random(seed)
    return [round(least * (most / least) ** drawn.random()) for _ in range(count)]


def replicas(count: int, **more: Any) -> Pair:
    """Return the pair of another number of replicas."""
    return Pair({"replicas": count}, {"replicas": count, **more})


ONE_STEP_OFF = Pair({"steps_ahead": 1}, {"ahead": 1, "after_rollout": True})
RISING, FLAT, BENT = [0.008, 0.0015, 0.0], [0.02, 0.0, 0.0], [0.012, 0.0, 0.0015]
VARIANTS = {"by_turns": "by turns in B"}
PLANS: dict[str, tuple[dict[str, Any], tuple[Pair, ...]]] = {
    "one engine that slows down": (
        {"curve_s": RISING, "lengths": lengths(11, 24, 10, 90)},
        (replicas(2), replicas(4), replicas(2, by_turns=True)),
    ),
    "two engines that slow down": (
        {"curve_s": RISING, "lengths": lengths(12, 24, 10, 90), "replicas": 2},
        (replicas(4), replicas(1)),
    ),
    "one engine that does not": (
        {"curve_s": FLAT, "lengths": lengths(13, 24, 10, 90)},
        (replicas(2),),
    ),
    "one engine that slows down from eight on": (
        {"curve_s": BENT, "lengths": lengths(14, 24, 10, 90)},
        (replicas(2), replicas(3)),
    ),
    "agents of three turns": (
        {"curve_s": RISING, "lengths": lengths(15, 16, 6, 40), "turns": 3},
        (replicas(2), replicas(4, by_turns=True)),
    ),
    "one engine with six slots": (
        {"curve_s": RISING, "lengths": lengths(16, 24, 8, 60), "slots": 6},
        (replicas(2),),
    ),
    "short rollout": (
        {"curve_s": RISING, "lengths": lengths(17, 16, 10, 60), "ranks_s": [1.5, 1.4]},
        (ONE_STEP_OFF,),
    ),
    "long rollout": (
        {"curve_s": RISING, "lengths": lengths(18, 24, 20, 90)},
        (
            ONE_STEP_OFF,
            Pair({"steps_ahead": 1, "replicas": 2}, {**ONE_STEP_OFF.after, "replicas": 2}),
        ),
    ),
    "rollout as long as the training": (
        {"curve_s": FLAT, "lengths": lengths(19, 16, 10, 60), "ranks_s": [1.0, 1.1]},
        (ONE_STEP_OFF,),
    ),
}


def run(plan: dict[str, Any], folder: Path) -> list[CapturedStep]:
    """Run the loop; return its captured steps.

    Raises:
        RuntimeError: The loop has failed.
    """
    program = str(Path(__file__).with_name("what_if_engine_loop.py"))
    call([sys.executable, program, str(folder), json.dumps(plan)])
    return open_run(folder).steps()


def row(
    loop: str,
    plan: dict[str, Any],
    pair: Pair,
    before: list[CapturedStep],
    after: list[CapturedStep],
) -> dict[str, Any]:
    """Return the interval from the steps of A, beside the steps of B."""
    found = [step.what_if(**pair.change) for step in before]
    recorded_s = statistics.median(one.span_us for one in found) / 1e6
    rollout_s = statistics.median(
        sum(part.duration_us for part in step.what_if().path if part.stage.startswith("rollout"))
        / 1e6
        for step in before
    )
    had = plan.get("replicas", 1)
    linear_s = rollout_s * had / pair.change.get("replicas", had) + recorded_s - rollout_s
    spans_s = [step.what_if().span_us / 1e6 for step in after]
    ends = {
        name: statistics.median(getattr(one, f"{name}_us") for one in found) / 1e6
        for name in ("low", "predicted", "high")
    }
    return {
        "loop": ", ".join(
            (loop, *(said for name, said in VARIANTS.items() if pair.after.get(name)))
        ),
        "change": " ".join(found[0].changes),
        "recorded_s": recorded_s,
        "linear_s": linear_s / 2 if pair.after.get("ahead") else linear_s,
        **{f"{name}_s": seconds for name, seconds in ends.items()},
        "truth_s": statistics.median(spans_s),
        "extrapolated": any(note.startswith("extrapolated") for one in found for note in one.notes),
    }


def holds(row: dict[str, Any]) -> bool:
    """Return whether the interval has the step of B."""
    return bool(row["low_s"] <= row["truth_s"] <= row["high_s"])


def width(row: dict[str, Any]) -> float:
    """Return the width of the interval, as a share of that between no change and the best
    or worst case.
    """
    return float((row["high_s"] - row["low_s"]) / abs(row["recorded_s"] - row["linear_s"]))


def group(row: dict[str, Any]) -> str:
    """Return the kind of the change."""
    option = next(option for option in OPTIONS if option in row["change"])
    return f"`{option}`"


def all_pairs(found: dict[str, Any]) -> str:
    """Return the table of all pairs, and where they were measured."""
    lines = [
        "| loop | change | step of A | in proportion | predicted | interval | step of B | "
        "holds | width |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found["rows"]:
        recorded, linear, predicted, low, high, truth = (
            f"{one[f'{key}_s']:.2f} s"
            for key in ("recorded", "linear", "predicted", "low", "high", "truth")
        )
        interval = f"{low} to {high}{', extrapolated' if one['extrapolated'] else ''}"
        lines.append(
            f"| {one['loop']} | `{one['change']}` | {recorded} | {linear} | {predicted} | "
            f"{interval} "
            f"| {truth} | {'yes' if holds(one) else 'no'} | {width(one):.0%} |"
        )
    return "\n".join([*lines, "", f"{results.where(found['measured'])}."])


def markdown(found: dict[str, Any]) -> str:
    """Return how often an interval holds the step of B by kind of change, and the misses."""
    lines = [
        "| change | pairs | intervals that hold | median width | median error |",
        "|---" * 5 + "|",
    ]
    for kind, pairs in groupby(sorted(found["rows"], key=group), group):
        chosen = list(pairs)
        wide, off = (
            statistics.median(map(of, chosen)) for of in (width, lambda one: abs(error(one)))
        )
        lines.append(
            f"| {kind} | {len(chosen)} | {sum(map(holds, chosen))} | {wide:.0%} | {off:.1%} |"
        )
    misses = (f"- {one['loop']}: `{one['change']}`" for one in found["rows"] if not holds(one))
    return "\n".join([*lines, "", "Misses:", "", *misses])


def main() -> None:
    """Run the pairs that are asked for, and print the table;
    all of them are kept as the results.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--loops", nargs="*", choices=PLANS, help="only these; keeps no results")
    given = parser.parse_args()
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    rows, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="what-if-resources-") as folder:
        for loop in given.loops or PLANS:
            plan, pairs = PLANS[loop]
            before = run(plan, Path(folder, loop))
            for number, pair in enumerate(pairs):
                after = run({**plan, **pair.after}, Path(folder, f"{loop} {number}"))
                rows.append(row(loop, plan, pair, before, after))
                print(rows[-1], file=sys.stderr, flush=True)
    found = {"measured": results.here(), "rows": rows}
    if not given.loops:
        results.write(RESULTS, found)
    print(all_pairs(found), markdown(found), sep="\n\n")
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
