"""What the watch notices of fourteen faults in three loops, whom it names, and what the capture
says first.

Run: ``make watch-judge``. Each cell is a run of a program: ``watch_judge_user.py``,
``watch_judge_ranks.py`` or ``watch_judge_pipeline.py``. Of the package only public doors are used:
the log, ``watch.jsonl``, the manifests, and ``verl-profiling report --json``. ``--fault`` and
``--loop`` choose cells.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import results
from ranks import environments
from watch_judge_plan import LOG, Plan

__all__ = ["FAULTS", "LOOPS", "Fault", "markdown"]

RESULTS = Path(__file__).with_name("watch_judge.json")
LOOPS = ("user", "ranks", "pipeline")
RANKS = 2
MATTERS = 0.1
"""A process counts as named in a step if it is said to be longer than its peers
by this share of it.
"""
BLAMING = ("straggler", "long_tail")
"""Findings that name a process as the cause; the lanes of others have only lost time."""
LIMIT_S = 300
LONGEST = re.compile(r"watch: step (\d+) .*longest there: (\w+)")
SPAN = re.compile(r"\b(?:tool|wait):\w+")


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        name: It, for the table.
        plan: What the loop is told.
        who: Whose fault it is: the begin of the lane's name, by loop; of loops that are left out,
            nobody's.
        loops: The loops that can have it.
    """

    name: str
    plan: dict[str, Any]
    who: dict[str, str] = field(default_factory=dict)
    loops: tuple[str, ...] = LOOPS


RANK_1 = dict.fromkeys(LOOPS, "actor_rank1")
AGENTS = {"user": "agent_loop_rank", "pipeline": "agent_loop_rank"}
FAULTS = (
    Fault(
        "rank 1 twice as slow, all-reduce a stage of its own",
        {"what": "compute 1", "by": 2.0, "split": True},
        RANK_1,
    ),
    Fault(
        "rank 1 twice as slow, all-reduce inside the stage",
        {"what": "compute 1", "by": 2.0},
        RANK_1,
    ),
    Fault(
        "rank 1 has 1.5 times the tokens from the first step",
        {"what": "compute 1", "by": 1.5, "begin": 1, "split": True},
        RANK_1,
    ),
    Fault(
        "a tool three times as slow, trajectories in no stage",
        {"what": "tool", "by": 3.0, "tool_s": 0.03, "marked": False},
        AGENTS,
    ),
    Fault(
        "a tool three times as slow, stage marked, step 1.4 times as long",
        {"what": "tool", "by": 3.0, "marked": True},
        AGENTS,
    ),
    Fault("the update 1.4 times as long on all ranks", {"what": "update", "by": 1.4}),
    Fault("rank 1 hangs, once", {"what": "compute 1", "hang_s": 60.0, "split": True}, RANK_1),
    Fault(
        "engine 1 three times as slow",
        {"what": "engine 1", "by": 3.0},
        {"user": "rollout1", "ranks": "actor_rank1", "pipeline": "rollout1"},
    ),
    Fault(
        "the loop's own code five times as long, in no stage",
        {"what": "own code", "by": 5.0},
        {"user": "controller", "pipeline": "controller"},  # all ranks of a loop run it
    ),
    Fault(
        "rank 1 four times as slow in every third step",
        {"what": "compute 1", "by": 4.0, "every": 3},
        RANK_1,
    ),
    Fault(
        "rank 1 twice as slow for 16 steps, and again 30 steps later",
        {"what": "compute 1", "by": 2.0, "until": 31, "again": 61, "steps": 75},
        RANK_1,
    ),
    Fault(
        "a tool three times as slow, two trajectories at a time",
        {"what": "tool", "by": 3.0, "tool_s": 0.03, "marked": True, "slots": 2},
        AGENTS,
        ("user", "pipeline"),
    ),
    Fault(
        "a tool three times as slow, rollouts longer than the training",
        {"what": "tool", "by": 3.0, "tool_s": 0.08, "marked": True},
        AGENTS,
        ("pipeline",),
    ),
    Fault(
        "scoring four times as slow, step 1.1 times as long",
        {"what": "reward", "by": 4.0},
        {"user": "agent_loop_rank", "pipeline": "reward_rank0"},
        ("user", "pipeline"),
    ),
    Fault("none", {}),
)


def run(fault: Fault, loop: str, folder: Path, hang_s: float) -> dict[str, Any]:
    """Run one cell; return its row.

    Raises:
        RuntimeError: The loop has failed.
    """
    folder.mkdir(parents=True)
    plan = Plan(str(folder), **fault.plan)
    plan = replace(plan, hang_s=min(plan.hang_s, hang_s))
    plan.write()
    command = [sys.executable, str(Path(__file__).with_name(f"watch_judge_{loop}.py")), str(folder)]
    processes = []
    for rank, given in enumerate(environments(RANKS) if loop == "ranks" else [None]):
        with (folder / (f"rank{rank}.txt" if rank else LOG)).open("w") as log:
            processes.append(subprocess.Popen(command, env=given, stdout=log, stderr=log))
    try:
        statuses = [process.wait(LIMIT_S + plan.hang_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        raise RuntimeError(
            f"{fault.name}, {loop}: the loop failed: {(folder / LOG).read_text()[-2000:]}"
        )
    return verdict(fault, loop, plan, folder)


def verdict(fault: Fault, loop: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """Return what became of a run, by what it left."""
    begin = plan.begin if plan.what else plan.steps + 1
    who = fault.who.get(loop, "")
    captured = next(iter(plan.captured()), None)
    trigger = json.loads((captured / "manifest.json").read_text())["trigger"] if captured else {}
    steps = list(steps_of(folder))
    judged = [step for step in steps[: plan.steps] if not plan.what or plan.may_be_it(step["step"])]
    led = Counter(name for step in judged if (name := leader(step)))
    said = LONGEST.findall((folder / LOG).read_text())
    longest = [lane for step, lane in said if not captured and plan.may_be_it(int(step))]
    return {
        "fault": fault.name,
        "loop": loop,
        "who": who,
        "noticed": next(
            filter(plan.may_be_it, [trigger.get("noticed") or 0, *plan.noticed()]), None
        ),
        "meanwhile": bool(plan.hang_s)
        and any(said_in(step, folder) for step in steps if step["step"] == begin),
        "captured": captured is not None,
        "named": [
            *(trigger.get("suspects") or longest)[:1],
            *SPAN.findall(trigger.get("reason", ""))[:1],
        ],
        "led": dict(led.most_common()),
        "finding": first_finding(captured) if captured else "",
        "again": next((step for step in plan.noticed() if step >= plan.again > 0), None),
        "alarms": sum(is_quiet(step, plan) for step in plan.noticed()),
        "quiet_steps": sum(is_quiet(step, plan) for step in range(1, plan.steps + 1)),
    }


def is_quiet(step: int, plan: Plan) -> bool:
    """Return whether a step is before the fault, or after its repair."""
    return not plan.what or step < plan.begin or plan.until <= step < plan.again


def said_in(step: dict[str, Any], folder: Path) -> bool:
    """Return whether the log has a warning of the package from within a step that hung."""
    times = re.findall(
        r"^([\d.]+) WARNING verl_profiling", (folder / LOG).read_text(), re.MULTILINE
    )
    return any(step["begin_ns"] < 1e9 * float(time) < step["end_ns"] - 1e9 for time in times)


def steps_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the steps of the log of the watch; of each the last line."""
    lines = (folder / "run" / "watch.jsonl").read_text().splitlines()
    steps = {one["step"]: one for one in map(json.loads, lines)}
    yield from steps.values()


def leader(step: dict[str, Any]) -> str:
    """Return who is said to have led by most in a step; empty if nobody by as much as matters."""
    rows = [row for row in step["exposed"] if row.get("leader") and row["name"]]
    most = max(rows, key=lambda row: row.get("lead_ns", 0), default=None)
    matters_ns = MATTERS * (step["end_ns"] - step["begin_ns"])
    return most["leader"] if most is not None and most.get("lead_ns", 0) >= matters_ns else ""


def is_right(name: str, who: str) -> bool:
    """Return whether a process is the one at fault."""
    return bool(who) and name.startswith(who)


def first_finding(folder: Path) -> str:
    """Return the rule and the lane of what the report of a capture says first."""
    command = [sys.executable, "-m", "verl_profiling.cli", "report", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    first = next(iter(report.get("steps", [report])[0]["findings"]), None)
    return " ".join([first["rule"], *first["lanes"][:1]]) if first else ""


def markdown(found: dict[str, Any]) -> str:
    """Return the table, what it comes to, and where it was measured."""
    rows = found["rows"]
    lines = [
        "| fault | loop | noticed at | named first | longest in `watch.jsonl` | first "
        "finding | alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        named = [
            name if is_right(name, row["who"]) or ":" in name else f"**{name}**"
            for name in row["named"]
        ]
        led = [
            f"{name if is_right(name, row['who']) else f'**{name}**'} {many}"
            for name, many in row["led"].items()
        ]
        cells = [
            row["fault"],
            row["loop"],
            noticed(row),
            ", ".join(named)
            or ("nobody" if row["captured"] else "no capture" if row["noticed"] else ""),
            ", ".join(led[:2]),
            f"**{row['finding']}**" if finds_innocent(row) else row["finding"],
            str(row["alarms"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    faulty = [row for row in rows if row["fault"] != "none"]
    lines += [
        "",
        f"{len(faulty)} runs with a fault, {sum(bool(row['noticed']) for row in faulty)} of "
        "them noticed. "
        f"An innocent process (bold) was named by the watch in {sum(map(is_wrong, faulty))} "
        "of them, "
        f"by the first finding of the capture in {sum(map(finds_innocent, faulty))}. "
        f"{sum(row['quiet_steps'] for row in rows):,} quiet steps with "
        f"{sum(row['alarms'] for row in rows)} alarms.",
        *(["", f"{results.where(found['measured'])}."] if "measured" in found else []),
    ]
    return "\n".join(lines)


def noticed(row: dict[str, Any]) -> str:
    """Return when a fault was noticed, as a cell."""
    never = "" if row["fault"] == "none" else "never"
    times = ["while it hung"] * row["meanwhile"] + [str(row["noticed"] or never)]
    if "again" in row["fault"]:
        times.append(f"again {row.get('again') or 'never'}")
    return ", ".join(times)


def is_wrong(row: dict[str, Any]) -> bool:
    """Return whether the watch named an innocent process,
    of those suspected first or leading most often.
    """
    first = [name for name in row["named"] if ":" not in name] or list(row["led"])[:1]
    return any(not is_right(name, row["who"]) for name in first)


def finds_innocent(row: dict[str, Any]) -> bool:
    """Return whether the first finding of the capture blames an innocent process."""
    rule, _, name = row["finding"].partition(" ")
    return rule in BLAMING and not is_right(name, row["who"])


def main() -> None:
    """Run the cells that are asked for, and print the table;
    all of them are kept as the results.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument(
        "--fault", default="", help="only faults that this pattern matches; keeps no results"
    )
    parser.add_argument(
        "--loop", default="", choices=["", *LOOPS], help="only this loop; keeps no results"
    )
    parser.add_argument(
        "--hang-s", type=float, default=60.0, help="how long a hang lasts at most (s)"
    )
    parser.add_argument("--keep", type=Path, help="a folder for what the runs leave")
    given = parser.parse_args()
    loops = [loop for loop in LOOPS if given.loop in ("", loop)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="watch-judge-") as temporary:
        if set(loops) - {"ranks"}:
            import ray

            ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        for loop in loops:
            for number, fault in enumerate(FAULTS):
                if re.search(given.fault, fault.name) and loop in fault.loops:
                    folder = (given.keep or Path(temporary)) / f"{loop}-{number}"
                    rows.append(run(fault, loop, folder.absolute(), given.hang_s))
                    print(rows[-1], file=sys.stderr, flush=True)
    rows.sort(key=lambda row: [fault.name for fault in FAULTS].index(row["fault"]))
    found: dict[str, Any] = {"rows": rows}
    if not (given.fault or given.loop):
        found["measured"] = results.here()
        results.write(RESULTS, found)
    print(markdown(found))


if __name__ == "__main__":
    main()
