"""Predictions held against real runs: captures A, predicts B from A alone, runs B, and prints the errors.

Run: ``make what-if-judge``. Each run is a program of its own, ``what_if_loop.py``, with five captured steps.
A prediction is the median of the predictions from the steps of A. A spread is that of the steps of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import results

from verl_profiling.analysis import CapturedStep, open_run

__all__ = ["PAIRS", "Pair", "markdown"]

RESULTS = Path(__file__).with_name("what_if_judge.json")
LIMIT_S = 300

ENGINES = {"engines_s": [0.9, 0.5], "ranks_s": [0.4, 0.8], "reward_s": 0.2}
AGENTS = {"generate_s": [0.1, 0.12, 0.15, 0.18, 0.2, 0.25, 0.3, 0.6], "tool_s": 0.2, "ranks_s": [0.5, 0.5]}
BESIDE = {"engines_s": [1.4, 1.2], "ranks_s": [0.5, 0.5], "beside": True}


@dataclass(frozen=True)
class Pair:
    """Two runs that differ by one change.

    Attributes:
        base: Plan of run A.
        change: Arguments of ``CapturedStep.what_if``.
        plan: The change, in the plan of run B.
    """

    base: dict[str, Any]
    change: dict[str, Any]
    plan: dict[str, Any] = field(default_factory=dict)


PAIRS = (
    Pair(ENGINES, {}),
    Pair(ENGINES, {"scale": {"update_actor": 0.5}}, {"ranks_s": [0.2, 0.4]}),
    Pair(ENGINES, {"scale": {"rollout": 0.5}}, {"engines_s": [0.45, 0.25]}),
    Pair(ENGINES, {"scale": {"reward": 2.0}}, {"reward_s": 0.4}),
    Pair(ENGINES, {"balance": ["update_actor"]}, {"ranks_s": [0.6, 0.6]}),
    Pair(ENGINES, {"balance": ["rollout"]}, {"engines_s": [0.7, 0.7]}),
    Pair(
        ENGINES,
        {"balance": ["rollout"], "scale": {"update_actor": 1.5}},
        {"engines_s": [0.7, 0.7], "ranks_s": [0.6, 1.2]},
    ),
    Pair(AGENTS, {}),
    Pair(AGENTS, {"tools": {"search": 0.05}}, {"tool_s": 0.05}),
    Pair(AGENTS, {"tools": {"search": 0.4}}, {"tool_s": 0.4}),
    Pair(AGENTS, {"no_tail": 87.5}, {"done": 0.875}),
    Pair(AGENTS, {"no_tail": 50.0}, {"done": 0.5}),
    Pair(AGENTS, {"no_tail": 75.0, "tools": {"search": 0.1}}, {"done": 0.75, "tool_s": 0.1}),
    Pair(BESIDE, {}),
    Pair(BESIDE, {"scale": {"update_actor": 0.5}}, {"ranks_s": [0.25, 0.25]}),
    Pair(BESIDE, {"scale": {"rollout": 0.5}}, {"engines_s": [0.7, 0.6]}),
)


def run(plan: dict[str, Any], folder: Path) -> list[CapturedStep]:
    """Run the loop; return its captured steps.

    Raises:
        RuntimeError: The loop has failed.
    """
    command = [
        sys.executable,
        str(Path(__file__).with_name("what_if_loop.py")),
        str(folder),
        json.dumps(plan),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{plan}: {done.stderr[-2000:]}")
    return open_run(folder).steps()


def row(pair: Pair, before: list[CapturedStep], after: list[CapturedStep]) -> dict[str, Any]:
    """Return the prediction from the steps of A, beside the steps of B."""
    found = [step.what_if(**pair.change) for step in before]
    replayed = [step.what_if() for step in before]
    spans_s = [step.what_if().span_us / 1e6 for step in after]
    return {
        "loop": next(name for name, base in LOOPS.items() if base is pair.base),
        "change": " ".join(found[0].changes) or "none",
        "recorded_s": statistics.median(one.span_us for one in found) / 1e6,
        "predicted_s": statistics.median(one.predicted_us for one in found) / 1e6,
        "truth_s": statistics.median(spans_s),
        "spread_s": max(spans_s) - min(spans_s),
        "recorded_spread_s": (max(one.span_us for one in found) - min(one.span_us for one in found)) / 1e6,
        "replay_error": max(abs(one.predicted_us / one.span_us - 1) for one in replayed),
    }


LOOPS = {"engines": ENGINES, "agents": AGENTS, "beside": BESIDE}


def error(row: dict[str, Any]) -> float:
    """Return the error of a prediction, as a share of the true step."""
    return float(row["predicted_s"] / row["truth_s"] - 1)


def spread(row: dict[str, Any], run: str) -> str:
    """Return the spread of the steps of a run around their middle."""
    key = "recorded_spread_s" if run == "recorded" else "spread_s"
    return f"±{row[key] / 2 / row[f'{run}_s']:.1%}"


def is_wrong_way(row: dict[str, Any]) -> bool:
    """Return whether a step changed against the prediction, by more than the spread of both runs."""
    truth, predicted = (row[key] - row["recorded_s"] for key in ("truth_s", "predicted_s"))
    noise = max(row["spread_s"], row["recorded_spread_s"])
    return bool(row["change"] != "none" and abs(truth) > noise and truth * predicted <= 0)


def markdown(found: dict[str, Any]) -> str:
    """Return the table, and the errors in all."""
    lines = [
        "| loop | change | step of A | predicted | step of B | error | spread of A | spread of B |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found["rows"]:
        cells = (f"{one[key]:.3f} s" for key in ("recorded_s", "predicted_s", "truth_s"))
        spreads = f"{spread(one, 'recorded')} | {spread(one, 'truth')}"
        wrong = ", wrong way" if is_wrong_way(one) else ""
        what = f"`{one['change']}`" if one["change"] != "none" else "none"
        lines.append(
            f"| {one['loop']} | {what} | {' | '.join(cells)} | {error(one):+.1%}{wrong} | {spreads} |"
        )
    changed = [one for one in found["rows"] if one["change"] != "none"]
    errors = [abs(error(one)) for one in changed]
    if errors:
        lines += [
            "",
            f"{len(errors)} pairs with a change: error {statistics.median(errors):.1%} in the median, "
            f"at most {max(errors):.1%}; {sum(map(is_wrong_way, changed))} in the wrong direction.",
        ]
    if "measured" in found:
        lines += ["", f"{results.where(found['measured'])}."]
    return "\n".join(lines)


def main() -> None:
    """Run the pairs that are asked for, and print the table; all of them are kept as the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--loop", default="", choices=["", *LOOPS], help="only this loop; keeps no results")
    parser.add_argument(
        "--change", default="", help="only changes that this pattern matches; keeps no results"
    )
    given = parser.parse_args()
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    rows = []
    with tempfile.TemporaryDirectory(prefix="what-if-judge-") as folder:
        for loop, base in LOOPS.items():
            pairs = [
                pair for pair in PAIRS if pair.base is base and re.search(given.change, str(pair.change))
            ]
            if given.loop not in ("", loop) or not pairs:
                continue
            for number, pair in enumerate(pairs):
                before = run(base, Path(folder, f"{loop}{number}a"))
                after = run({**base, **pair.plan}, Path(folder, f"{loop}{number}b"))
                rows.append(row(pair, before, after))
                print(rows[-1], file=sys.stderr, flush=True)
    found: dict[str, Any] = {"rows": rows}
    if not (given.loop or given.change):
        found["measured"] = results.here()
        results.write(RESULTS, found)
    print(markdown(found))


if __name__ == "__main__":
    main()
