"""Holds the rule of docs/agents-guide.md against planted faults: from ``report --json`` alone, does
it find who is at fault, and the first change?

Run: ``make guide-judge``. Faults are drawn by a seed: steps of drawn traces, whose sizes, rank and
fault are drawn, and runs of two loops of ``watch_judge.py`` (``user`` and ``ranks``), whose fault,
process and factor are drawn; their steps are captured by the watch. Healthy steps are among them,
in which the rule is to find nobody. ``--drawn`` and ``--real`` say how many of each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import results
import watch_judge
from watch_judge_plan import Plan

from verl_profiling.cli import main as command

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from drawn_steps import FAULTS, whole_step  # noqa: E402
from guide_rule import culprit_and_change  # noqa: E402

RESULTS = Path(__file__).with_name("guide_judge.json")
CHANGES = {
    "slow rank": ("--balance", "compare its data", "pass its work"),
    "long tail": ("--no-tail", "sort prompts", "look at its machine", "--scale rollout"),
    "host-bound": ("fewer, larger launches",),
    "slow weight sync": ("--scale update_weights",),
    "tool": ("--tools search",),
    "own code": ("look at the loop's code", "mark more of the loop"),
    "healthy": ("",),
}
"""Begin of the changes that undo a fault."""


def reported(folder: Path) -> dict[str, Any]:
    """Return what the command says of a step."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        command(["report", str(folder), "--json"])
    document: dict[str, Any] = json.loads(text.getvalue().splitlines()[0])
    return document


def judged(source: str, fault: str, who: str, folder: Path) -> dict[str, Any]:
    """Return the row of a step: the fault, what the rule finds, and whether that is right."""
    report = reported(folder)
    culprit, change = culprit_and_change(report)
    right = culprit.startswith(who) if who.startswith(("actor", "rollout")) else who in culprit
    return {
        "source": source,
        "fault": fault,
        "who": who,
        "culprit": culprit[:80],
        "change": change,
        "culprit_right": right if who else not culprit,
        "change_right": change.startswith(CHANGES[fault]) if who else not change,
    }


def drawn(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Draw a step."""
    fault = draw.choice(FAULTS)
    ranks, replicas = draw.choice((4, 6, 8, 12, 16)), draw.choice((2, 3, 4, 6))
    slow = draw.randrange(ranks)
    whole_step(folder, ranks=ranks, replicas=replicas, fault=fault, slow_rank=slow)
    who = {
        "healthy": "",
        "slow rank": f"actor_rank{slow}",
        "long tail": f"rollout{replicas - 1}_rank0",
        "host-bound": "actor_rank",
        "slow weight sync": "rollout",
    }
    return judged("drawn", fault, who[fault], folder)


def real(draw: random.Random, loop: str, folder: Path) -> dict[str, Any]:
    """Run a loop with a drawn fault until the watch has captured a step.

    Raises:
        RuntimeError: It has captured none.
    """
    number, by = draw.randrange(watch_judge.RANKS), round(draw.uniform(2.0, 4.0), 1)
    kinds: dict[str, tuple[dict[str, Any], str]] = {
        "slow rank": ({"what": f"compute {number}", "by": by}, f"actor_rank{number}"),
        "tool": ({"what": "tool", "by": by, "tool_s": 0.03, "marked": True}, "search"),
        "long tail": ({"what": f"engine {number}", "by": by}, f"rollout{number}"),
        "own code": ({"what": "own code", "by": 3 * by}, "controller"),
    }
    of_loop = {"user": list(kinds), "ranks": ["slow rank", "tool"]}
    kind = draw.choice(of_loop[loop])
    plan, who = kinds[kind]
    watch_judge.run(watch_judge.Fault(kind, plan), loop, folder, hang_s=0.0)
    captured = Plan(str(folder), **plan).captured()
    if not captured:
        raise RuntimeError(f"{loop}, {plan}: no step was captured")
    return judged(loop, kind, who, captured[0])


def markdown(found: dict[str, Any]) -> str:
    """Return the table, what it comes to, and where it was measured."""
    rows = found["rows"]
    lines = ["| steps | fault | drawn | culprit right | change right |", "|---|---|---|---|---|"]
    for source, fault in sorted({(row["source"], row["fault"]) for row in rows}):
        of = [row for row in rows if (row["source"], row["fault"]) == (source, fault)]
        right = [str(sum(row[what] for row in of)) for what in ("culprit_right", "change_right")]
        name = {"drawn": "drawn traces"}.get(source, f"loop `{source}`")
        lines.append(f"| {name} | {fault} | {len(of)} | {' | '.join(right)} |")
    both = sum(row["culprit_right"] and row["change_right"] for row in rows)
    lines += ["", f"Both are right in {both} of {len(rows)} ({both / len(rows):.0%})."]
    if "measured" in found:
        lines += ["", f"{results.where(found['measured'])}."]
    return "\n".join(lines)


def main() -> None:
    """Draw the faults, and print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--seed", type=int, default=1, help="what is drawn")
    parser.add_argument("--drawn", type=int, default=60, help="number of drawn steps")
    parser.add_argument("--real", type=int, default=12, help="number of runs of real loops")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="guide-judge-") as temporary:
        for number in range(given.drawn):
            rows.append(drawn(draw, Path(temporary, f"drawn{number}")))
        if given.real > 1:
            import ray

            ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        for number in range(given.real):
            loop = ("ranks", "user")[number % 2]
            rows.append(real(draw, loop, Path(temporary, f"{loop}{number}")))
            print(rows[-1], file=sys.stderr, flush=True)
    found = {"rows": rows, "seed": given.seed, "measured": results.here()}
    results.write(RESULTS, found)
    print(markdown(found))
    wrong = [row for row in rows if not (row["culprit_right"] and row["change_right"])]
    print(*wrong, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
