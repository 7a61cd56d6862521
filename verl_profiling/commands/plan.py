"""``verl-profiling plan``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.doctor import load_config
from verl_profiling.plan import Plan, plan_of

__all__ = ["configure", "run"]

_MOST_LISTED = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Prints what a configuration would capture: the settings as they were understood, the steps, the "
        "workers and stages of each role, and the files that each tool writes (how large they get depends "
        "on the work). Nothing is run or looked at. Exits 1 when nothing would be captured."
    )
    parser.epilog = "example: verl-profiling plan conf/ppo.yaml --steps 500"
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="settings, as YAML or JSON, or a run.json"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="number of the loop's last step")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a configuration."""
    config = load_config(arguments.config)
    plan = plan_of(config, arguments.steps)
    if arguments.json:
        print(msgspec.json.encode(plan).decode())
    else:
        print("\n".join(_lines(plan, arguments.steps)))
    return EXIT_OK if plan.captures_something else EXIT_FINDING


def _lines(plan: Plan, steps: int | None) -> Iterator[str]:
    yield "settings (the others are the defaults)"
    for key, value in plan.changed.items():
        yield f"  {key} = {msgspec.json.encode(value).decode()}"
    if not plan.settings["enable"]:
        yield "  enable = false: nothing is captured"
        return
    yield f"captures ({plan.schedule})"
    for capture in plan.captures[:_MOST_LISTED]:
        what = (
            f"step {capture.first}"
            if capture.first == capture.last
            else f"steps {capture.first} to {capture.last}"
        )
        yield f"  {what:<20}  {capture.folder}/"
    if plan.more_captures:
        yield "  ... and more" + ("; --steps N says where the loop ends" if steps is None else "")
    elif len(plan.captures) > _MOST_LISTED:
        yield f"  ... {len(plan.captures)} captures in all, the last in {plan.captures[-1].folder}/"
    if not plan.captures:
        yield "  none" + (f" up to step {steps}" if steps is not None else "")
    if plan.warm_ups:
        yield f"  warm-up, thrown away: {_few(plan.warm_ups)}"
    if plan.never:
        yield f"  never come in {steps} steps: {_few(plan.never)}"
    if plan.kept:
        yield f"  kept on disk: {plan.kept}"
    for caution in plan.cautions:
        yield f"caution: {caution}"
    for role in plan.roles:
        yield f"role {role.role}" if role.role else ("every other role" if plan.roles[1:] else "every role")
        if not role.captured:
            yield "  not captured"
            continue
        yield f"  mode     {role.mode}"
        yield f"  workers  {role.workers}"
        if role.stages:
            yield f"  stages   {role.stages}"
        for index, files in enumerate(role.files):
            yield f"  {'' if index else 'files':<8} {files}"
        if role.most_files:
            once = ", if every stage runs once" if role.mode == "discrete" else ""
            yield f"           at most {role.most_files} for each capture{once}"


def _few(steps: list[int]) -> str:
    more = f" and {len(steps) - _MOST_LISTED} more" if len(steps) > _MOST_LISTED else ""
    return ", ".join(map(str, steps[:_MOST_LISTED])) + more
