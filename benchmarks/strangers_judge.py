"""What ``what-if`` offers for loops of strangers, made for real: prediction, truth and interval.

Run: ``make strangers-judge``. Three loops are written as a new user writes them, from the docs
alone, with real compute: ``strangers_ranks.py``, ``strangers_one_off.py``, ``strangers_agents.py``.
Each loop captures a plan. Every change that ``what-if`` then offers is made in the loop, and some
that it can be asked for. A prediction is the median over the captured steps of the plan; a truth
is the median over those with the change. An offer that the loop cannot make counts, too. Last, the
plan runs again, which shows the noise of the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from strangers_work import CAPTURED
from what_if_judge import error, is_wrong_way, spread

from verl_profiling.analysis import CapturedStep, open_step

__all__ = ["all_pairs", "markdown"]

HERE = Path(__file__).parent
RESULTS = HERE / "strangers_judge.json"
Plan = dict[str, Any]
Change = tuple[dict[str, Any], Callable[[Plan], None]]
"""Arguments of ``CapturedStep.what_if``, and the function that makes the change in a plan."""
NONE = "none"
UNCHANGED: Change = ({}, lambda plan: None)
"""The plan again, after all changes: what the machine makes of it."""


@dataclass(frozen=True)
class Loop:
    """A loop, and the changes that can be made in it.

    Attributes:
        program: The program that runs it.
        plans: Plans to capture.
        changes: Changes by option of ``what-if``.
        asked: Options that are tried although ``what-if`` may not offer them, by name of the plan.
    """

    program: str
    plans: dict[str, Plan]
    changes: dict[str, Change]
    asked: dict[str, tuple[str, ...]]


def times(value: Any, factor: float) -> Any:
    """Return a number of a plan, or all numbers of its lists, times a factor."""
    if isinstance(value, list):
        return [times(each, factor) for each in value]
    return round(value * factor) if isinstance(value, int) else value * factor


def scaled(stage: str, factor: float, *keys: str) -> dict[str, Change]:
    """Return the change of a stage whose work is under some keys of a plan."""

    def make(plan: Plan) -> None:
        for key in keys:
            plan[key] = times(plan[key], factor)

    return {f"--scale {stage}={factor:g}": ({"scale": {stage: factor}}, make)}


def called(name: str, factor: float, key: str) -> dict[str, Change]:
    """Return the change of a tool."""

    def make(plan: Plan) -> None:
        plan[key] = times(plan[key], factor)

    text = f"{factor:g}x"
    return {f"--tools {name}={text}": ({"tools": {name: text}}, make)}


def balanced(stage: str, key: str) -> dict[str, Change]:
    """Return the change that gives each rank the mean."""

    def make(plan: Plan) -> None:
        rows = plan[key]
        if isinstance(rows[0], list):
            means = [round(statistics.mean(column)) for column in zip(*rows, strict=True)]
            plan[key] = [means for _ in rows]
        else:
            plan[key] = [round(statistics.mean(rows))] * len(rows)

    return {f"--balance {stage}": ({"balance": [stage]}, make)}


def dealt(stage: str, key: str) -> dict[str, Change]:
    """Return the change that deals the runs of all ranks in rounds, the longest first."""

    def make(plan: Plan) -> None:
        runs = sorted((run for row in plan[key] for run in row), reverse=True)
        ranks = len(plan[key])
        after: list[list[int]] = [[] for _ in range(ranks)]
        for place in range(0, len(runs), ranks):
            for row, run in zip(sorted(after, key=sum), runs[place : place + ranks], strict=True):
                row.append(run)
        plan[key] = after

    return {f"--balance {stage}=longest-first": ({"balance": [f"{stage}=longest-first"]}, make)}


def by_work(stage: str, key: str) -> dict[str, Change]:
    """Return the change that gives each rank the mean work; a slow rank stays slow."""
    ((_, (_, make)),) = balanced(stage, key).items()
    return {f"--balance {stage}=work": ({"balance": [f"{stage}=work"]}, make)}


def setting(option: str, arguments: dict[str, Any], **values: Any) -> dict[str, Change]:
    """Return the change that sets values of a plan."""
    return {option: (arguments, lambda plan: plan.update(values))}


def tail(percent: float, count: int) -> dict[str, Change]:
    """Return the change that leaves out a rollout's tail."""
    wanted = math.ceil(count * percent / 100)
    return setting(f"--no-tail {percent:g}", {"no_tail": percent}, wanted=wanted)


TOKENS = [10, 12, 8, 16, 10, 14, 12, 10, 18, 28]
AGENT: Plan = {
    "pool": 4,
    "tokens": TOKENS,
    "turns": 2,
    "search_s": 0.08,
    "sandbox": 12,
    "in_threads": False,
    "score": 8,
    "wanted": len(TOKENS),
    "advantage": 12,
    "update_actor": [40, 28],
    "load": 20,
}
ROLLOUT_KEYS = ("tokens", "search_s", "sandbox", "score")
AGENT_CHANGES = {
    **scaled("rollout", 0.5, *ROLLOUT_KEYS),
    **scaled("rollout", 1.5, *ROLLOUT_KEYS),
    **scaled("advantage", 0.5, "advantage"),
    **scaled("update_actor", 0.5, "update_actor"),
    **scaled("update_actor", 1.5, "update_actor"),
    **scaled("update_weights", 0.5, "load"),
    **called("search", 0.5, "search_s"),
    **called("search", 3, "search_s"),
    **called("sandbox", 0.5, "sandbox"),
    **called("sandbox", 2, "sandbox"),
    **called("reward", 0.5, "score"),
    **called("reward", 3, "score"),
    **setting("--unblock sandbox", {"unblock": ["sandbox"]}, in_threads=True),
    **tail(90, len(TOKENS)),
    **tail(70, len(TOKENS)),
    **balanced("update_actor", "update_actor"),
}
RANKS: Plan = {
    "rollout": [20, 16, 24, 44],
    "old_log_prob": [8, 8, 12, 20],
    "update_actor": [[8, 10, 6, 16], [6, 8, 18, 8], [20, 8, 8, 8], [10, 18, 8, 12]],
    "pace": [1, 1, 1, 1],
    "load": 16,
    "reward": 16,
}
LOOPS = {
    "ranks": Loop(
        "strangers_ranks.py",
        {"unequal data": RANKS, "a slow rank": {**RANKS, "pace": [1, 1, 1.5, 1]}},
        {
            **scaled("rollout", 0.5, "rollout"),
            **scaled("reward", 0.5, "reward"),
            **scaled("old_log_prob", 0.5, "old_log_prob"),
            **scaled("update_actor", 0.5, "update_actor"),
            **scaled("update_actor", 1.5, "update_actor"),
            **scaled("mini_batch", 0.5, "update_actor"),
            **scaled("update_weights", 0.5, "load"),
            **balanced("rollout", "rollout"),
            **balanced("old_log_prob", "old_log_prob"),
            **balanced("update_actor", "update_actor"),
            **balanced("mini_batch", "update_actor"),
            **by_work("update_actor", "update_actor"),
            **dealt("update_actor", "update_actor"),
        },
        {
            "unequal data": (
                "--balance old_log_prob",
                "--scale update_actor=1.5",
                "--balance update_actor=work",
                "--balance update_actor=longest-first",
            ),
            "a slow rank": ("--balance update_actor=work",),
        },
    ),
    "one step off": Loop(
        "strangers_one_off.py",
        {
            "waits for the tail": {**AGENT, "pool": 100, "score": 0, "sandbox": 0},
            "waits for the training": {
                **AGENT,
                **{"pool": 100, "score": 0, "sandbox": 0, "turns": 1, "update_actor": [120, 90]},
            },
        },
        AGENT_CHANGES,
        {
            "waits for the tail": ("--scale update_actor=0.5", "--tools search=3x"),
            "waits for the training": (
                "--scale rollout=1.5",
                "--tools search=3x",
                "--balance update_actor",
            ),
        },
    ),
    "agents": Loop(
        "strangers_agents.py",
        {
            "a blocking tool": AGENT,
            "a serial service": {**AGENT, "in_threads": True, "score": 24, "pool": 6},
        },
        AGENT_CHANGES,
        {
            "a blocking tool": ("--tools sandbox=2x", "--no-tail 70", "--balance update_actor"),
            "a serial service": ("--tools reward=3x", "--tools search=3x"),
        },
    ),
}


class Program:
    """A running loop, which takes plans one after another.

    Args:
        loop: The loop.
        folder: Folder for its run.
    """

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.run = folder / "run"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / loop.program), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError((self.run.parent / "stderr").read_text()[-2000:])
        return line.strip()

    def steps_of(self, plan: Plan) -> list[CapturedStep]:
        """Run a plan; return its captured steps."""
        assert self._process.stdin is not None
        print(json.dumps(plan), file=self._process.stdin, flush=True)
        last = int(self._answer())
        numbers = range(last - CAPTURED + 1, last + 1)
        return [open_step(self.run / f"step_{number:06d}") for number in numbers]

    def close(self) -> None:
        """End the loop."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def offered(steps: list[CapturedStep]) -> list[str]:
    """Return the options that most steps offer, the largest effect first."""
    counts = Counter(row.option for step in steps for row in step.what_if().what_would_help)
    return [option for option, count in counts.most_common() if 2 * count > len(steps)]


def row(
    place: tuple[str, str], option: str, is_offered: bool, change: Change, before: Any, after: Any
) -> dict[str, Any]:
    """Return the prediction from the steps of the plan, beside the steps with the change."""
    found = [step.what_if(**change[0]) for step in before]
    spans_s = [step.what_if().span_us / 1e6 for step in after]
    recorded_s = [one.span_us / 1e6 for one in found]
    ends = {}
    if any(one.low_us is not None for one in found):
        ends["low_s"] = statistics.median(one.low_us or one.predicted_us for one in found) / 1e6
        ends["high_s"] = statistics.median(one.high_us or one.predicted_us for one in found) / 1e6
    return {
        "loop": place[0],
        "plan": place[1],
        "change": option,
        "offered": is_offered,
        "recorded_s": statistics.median(recorded_s),
        "recorded_spread_s": max(recorded_s) - min(recorded_s),
        "predicted_s": statistics.median(one.predicted_us for one in found) / 1e6,
        "truth_s": statistics.median(spans_s),
        "spread_s": max(spans_s) - min(spans_s),
        **ends,
    }


def judged(name: str, folder: Path, pattern: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a loop with all changes; return the rows, and the offers that it cannot make."""
    loop, rows, impossible = LOOPS[name], list[dict[str, Any]](), list[str]()
    folder.mkdir()
    program = Program(loop, folder)
    try:
        for plan_name, plan in loop.plans.items():
            if pattern not in plan_name:
                continue
            before = program.steps_of(plan)
            offers = offered(before)
            print(name, plan_name, offers, file=sys.stderr, flush=True)
            for option in dict.fromkeys([*offers, *loop.asked[plan_name]]):
                if option not in loop.changes:
                    impossible.append(f"{name}, {plan_name}: `{option}`")
                    continue
                change = loop.changes[option]
                changed = copy.deepcopy(plan)
                change[1](changed)
                after = program.steps_of(changed)
                place = (name, plan_name)
                rows.append(row(place, option, option in offers, change, before, after))
                print(cells(rows[-1]), file=sys.stderr, flush=True)
            again = program.steps_of(plan)
            rows.append(row((name, plan_name), NONE, False, UNCHANGED, before, again))
    finally:
        program.close()
    return rows, impossible


def holds(row: dict[str, Any]) -> bool:
    """Return whether the interval has the truth; a prediction without one holds."""
    return "low_s" not in row or bool(row["low_s"] <= row["truth_s"] <= row["high_s"])


def cells(row: dict[str, Any]) -> str:
    """Return the line of a change in the table."""
    recorded, predicted, truth = (
        f"{row[f'{key}_s']:.3f} s" for key in ("recorded", "predicted", "truth")
    )
    interval = ""
    if "low_s" in row:
        interval = f"{row['low_s']:.3f} to {row['high_s']:.3f} s"
        interval += "" if holds(row) else ", **no**"
    direction = "wrong" if is_wrong_way(row) else "right"
    offer = "" if row["offered"] or row["change"] == NONE else ", asked for"
    return (
        f"| {row['loop']}: {row['plan']} | `{row['change']}`{offer} | {recorded} | {predicted} "
        f"| {truth} | {error(row):+.1%} | {spread(row, 'recorded')} | {direction} | {interval} |"
    )


def all_pairs(found: dict[str, Any]) -> str:
    """Return the table of all changes, and where they were measured."""
    lines = [
        "| loop | change | step | predicted | brought | error | spread | direction | interval |",
        "|---" * 9 + "|",
        *map(cells, found["rows"]),
    ]
    return "\n".join([*lines, "", f"{results.where(found['measured'])}."])


def markdown(found: dict[str, Any]) -> str:
    """Return the errors by loop, and what is wrong."""
    lines = ["| loop | changes | median error | 90% of errors | under 6% | wrong direction |"]
    lines.append("|---" * 6 + "|")
    changed = [one for one in found["rows"] if one["change"] != NONE]
    groups = {name: [one for one in changed if one["loop"] == name] for name in LOOPS}
    for name, rows in [*groups.items(), ("all", changed)]:
        errors = sorted(abs(error(one)) for one in rows)
        if errors:
            most = errors[math.ceil(0.9 * len(errors)) - 1]
            near = sum(one < 0.06 for one in errors) / len(errors)
            lines.append(
                f"| {name} | {len(rows)} | {statistics.median(errors):.1%} | {most:.1%} "
                f"| {near:.0%} | {sum(map(is_wrong_way, rows))} |"
            )
    noise = max((abs(error(one)) for one in found["rows"] if one["change"] == NONE), default=0.0)
    with_interval = [one for one in changed if "low_s" in one]
    held = sum(map(holds, with_interval))
    offers = sum(one["offered"] for one in found["rows"])
    lines += [
        "",
        f"{offers} of the changes were offered, and {len(found['impossible'])} offers cannot be "
        f"made; {held} of {len(with_interval)} intervals hold. A plan that ran again differed by "
        f"{noise:.1%} at most.",
        "",
        *(f"- cannot be made: {text}" for text in found["impossible"]),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the loops that are asked for, and print the table; all of them are kept as results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--loops", nargs="*", default=list(LOOPS), choices=LOOPS)
    parser.add_argument("--plan", default="", help="only plans with this in their name")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    given = parser.parse_args()
    found: dict[str, Any] = {"measured": results.here(), "rows": [], "impossible": []}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="strangers-judge-") as folder:
        for name in given.loops:
            place = (given.keep or Path(folder)) / name.replace(" ", "_")
            rows, impossible = judged(name, place, given.plan)
            found["rows"] += rows
            found["impossible"] += impossible
    if given.loops == list(LOOPS) and not given.plan:
        results.write(RESULTS, found)
    print(all_pairs(found), markdown(found), sep="\n\n")
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
