"""``verl-profiling plan``: prints the steps, workers, stages and files that a configuration would capture."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.commands.doctor import load_config
from verl_profiling.identity import ROLLOUT_ROLE, step_folder_name
from verl_profiling.settings.config import ProfilingConfig, RoleConfig, RoleOverride
from verl_profiling.settings.schedule import Action, Schedule
from verl_profiling.tools import Tool
from verl_profiling.units import step_list

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
        yield f"  warm-up, thrown away: {step_list(plan.warm_ups)}"
    if plan.never:
        yield f"  never come in {steps} steps: {step_list(plan.never)}"
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


_MOST_CAPTURES = 10
_FAR = 100_000


class PlannedCapture(msgspec.Struct, frozen=True, kw_only=True):
    """One capture: its steps, both ends included, and its folder."""

    first: int
    last: int
    folder: str


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """The planned recording of one role.

    Attributes:
        role: The role; empty for all roles without settings of their own.
        captured: Whether it is captured at all.
        mode: ``e2e`` or ``discrete``.
        workers: The captured workers, as text.
        stages: The captured stages in discrete mode, as text.
        files: The files of each tool, as text.
        most_files: Largest number of files per capture; ``None`` without a list of ranks or stages.
    """

    role: str
    captured: bool
    mode: str
    workers: str
    stages: str
    files: list[str]
    most_files: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The planned captures of a configuration.

    Attributes:
        captures_something: Whether any role and step would be captured. An empty list of steps counts,
            because captures can be requested.
        settings: All settings, parsed.
        changed: Settings that differ from the defaults: value by dotted key.
        schedule: The selected steps, as text.
        captures: All captures, or the first ones if the length of the run is not known.
        more_captures: Whether further captures follow.
        warm_ups: Warm-up steps up to the last of ``captures``; their recordings are discarded.
        never: Listed steps after the end of the run.
        kept: The captures kept on disk, as text; empty for all.
        cautions: Sentences on settings that are valid, but may hurt the run or have no effect.
        roles: One entry for each role with settings of its own, and one for all others.
    """

    captures_something: bool
    settings: dict[str, Any]
    changed: dict[str, Any]
    schedule: str
    captures: list[PlannedCapture]
    more_captures: bool
    warm_ups: list[int]
    never: list[int]
    kept: str
    cautions: list[str]
    roles: list[PlannedRole]


def plan_of(config: ProfilingConfig, steps: int | None = None) -> Plan:
    """Return the plan of a configuration.

    Args:
        config: The settings.
        steps: Number of the loop's last step, if known.
    """
    schedule = config.schedule
    captures, warm_ups, more = _captures(schedule, schedule.last_step(steps))
    roles = [_role(config, role) for role in _roles(config)]
    settings = config.to_dict()
    return Plan(
        captures_something=(bool(captures) or schedule.steps == ()) and any(role.captured for role in roles),
        settings=settings,
        changed=dict(_changed(settings, ProfilingConfig().to_dict())),
        schedule=schedule.in_words(),
        captures=captures,
        more_captures=more,
        warm_ups=warm_ups,
        never=[step for step in schedule.steps or () if steps is not None and step > steps],
        kept="" if (last := config.limits.keep_last) is None else f"the last {last}",
        cautions=config.cautions(),
        roles=roles,
    )


def _captures(schedule: Schedule, last: int | None) -> tuple[list[PlannedCapture], list[int], bool]:
    """Return the captures, the warm-up steps up to the last of them, and whether more captures follow."""
    captures: list[PlannedCapture] = []
    warm_ups: list[int] = []
    most = _MOST_CAPTURES if last is None else _FAR
    first = schedule.every or 1 + schedule.skip_first
    steps = count(first, schedule.every or 1) if schedule.steps is None else sorted(set(schedule.steps))
    for step in islice(steps, _FAR):
        if last is not None and step > last:
            return captures, warm_ups, False
        found = schedule.step_range(step)
        if found is None or (captures and step <= captures[-1].last):
            continue
        if found.action is Action.WARMUP:
            warm_ups.append(step)
            continue
        if len(captures) == most:
            return captures, warm_ups, True
        end = found.last if last is None else min(found.last, last)
        captures.append(PlannedCapture(first=step, last=end, folder=step_folder_name(step)))
    return captures, warm_ups, schedule.steps is None


def _roles(config: ProfilingConfig) -> list[str]:
    named = list(dict.fromkeys([*(config.select.roles or ()), *config.roles]))
    return named if config.select.roles is not None else [*named, ""]


def _role(config: ProfilingConfig, role: str) -> PlannedRole:
    settings = config.for_role(role)
    discrete = settings.mode == "discrete"
    stages, each = "", 1
    if discrete and role == ROLLOUT_ROLE:
        stages = "from on_rollout_begin to on_rollout_end"
    elif discrete:
        named = sorted(settings.stages or ())
        stages, each = ", ".join(named) or "all", len(named)
    ranks = len(settings.ranks) if settings.ranks is not None else 0
    writing = sum(bool(tool.suffix) for tool in settings.tools)
    return PlannedRole(
        role=role,
        captured=settings.enable,
        mode=settings.mode,
        workers=_workers(settings),
        stages=stages,
        files=[_files(tool, settings) for tool in settings.tools],
        most_files=(ranks * each * writing or None) if writing else 0,
    )


def _workers(settings: RoleConfig) -> str:
    chosen = {
        "ranks": settings.ranks,
        **settings.coordinates,
        "replicas": settings.replicas,
    }
    given = [f"{name} {_numbers(numbers)}" for name, numbers in chosen.items() if numbers is not None]
    return "; ".join(given) or "all"


def _files(tool: Tool, settings: RoleConfig) -> str:
    if not tool.suffix:
        return f"{tool.name}: none; its spans are in manifest.json"
    worker = "rank of each replica" if settings.role == ROLLOUT_ROLE else "worker"
    if settings.role == ROLLOUT_ROLE and tool.starts_process:
        worker = "replica"
    per = f"{worker} and stage, each time that it runs" if settings.mode == "discrete" else worker
    later = "; collected after the run" if tool.starts_process else ""
    return f"{tool.name}: one *{tool.suffix} per {per}{later}"


def _numbers(numbers: frozenset[int]) -> str:
    """Return numbers as text with ranges, e.g. ``0, 8-15``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1 and number > 0:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _changed(
    values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        default = defaults.get(key)
        if prefix == "roles.":
            default = msgspec.to_builtins(RoleOverride())
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _changed(value, default, f"{prefix}{key}.")
        elif value != default:
            yield f"{prefix}{key}", value
