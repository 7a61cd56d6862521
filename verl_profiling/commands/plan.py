"""Prints what a configuration would capture.

These are all settings, the steps, the workers and stages of each role, and the files that each tool
writes (of unknown size). Nothing is started. Exits 1 when nothing would be captured.

example: verl-profiling plan conf/ppo.yaml --steps 500
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.commands.common import add_json, count, option, show
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import read_small
from verl_profiling.identity import ROLLOUT_ROLE, step_folder_name
from verl_profiling.level_shifts import noticed_from
from verl_profiling.settings.config import ProfilingConfig, WatchOptions
from verl_profiling.settings.roles import RoleConfig, RoleOverride
from verl_profiling.settings.schedule import MOST_CAPTURES, planned_captures
from verl_profiling.tools import Tool
from verl_profiling.units import step_list

_SPREADS = (0.08, 0.15, 0.3)


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The captured part of a role.

    Attributes:
        role: The role; empty for all roles that the settings do not name.
        enable: Whether the role is captured.
        mode: ``e2e`` or ``discrete``.
        workers: Numbers of the selected workers, by ``ranks``, ``replicas`` or a parallel dimension
            such as ``pp``; empty if all are selected.
        stages: Captured stages in discrete mode, empty for all; ``None`` in e2e mode.
        files: The files of each tool as text, by the name of the tool.
        most_files: Maximum number of files that a capture writes for the role, if every stage runs
            once; ``None`` if unknown.
    """

    role: str
    enable: bool
    mode: str
    workers: dict[str, list[int]]
    stages: list[str] | None
    files: dict[str, str]
    most_files: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The captures of a configuration; the document of ``plan --json``.

    Attributes:
        settings: The settings that differ from the defaults, by dotted key.
        enable: Whether anything is captured; if not, all other fields are empty.
        schedule: The schedule as text.
        captures: First and last step of each capture.
        more: Whether more captures follow.
        warm_ups: Steps that are recorded as a warm-up; their recordings are discarded.
        never: Steps of ``schedule.steps`` after the loop's last step, which never come.
        keep_last: Number of captures that are kept on disk; ``None`` for all.
        noticed_from: The ratio to the median from which the watch notices a slow stage within 8
            steps, by the spread of the stage; empty if it does not look for slow stages.
        cautions: Sentences on settings that are likely to be mistakes.
        roles: The plan of each role.
    """

    settings: dict[str, Any]
    enable: bool
    schedule: str = ""
    captures: list[tuple[int, int]] = []
    more: bool = False
    warm_ups: list[int] = []
    never: list[int] = []
    keep_last: int | None = None
    noticed_from: dict[float, float] = {}
    cautions: list[str] = []
    roles: list[RolePlan] = []


DOCUMENTS = (Plan,)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="settings, as YAML or JSON, or a run.json"
    )
    option(parser, "--steps N", "number of the loop's last step", count)
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Print the plan of a configuration; return whether something would be captured."""
    config = load_config(arguments.config)
    plan = plan_of(config, arguments.steps)
    show(arguments, plan, _lines(plan, arguments.steps))
    # An empty list of steps is no mistake: captures can be requested with trigger.
    has_steps = bool(plan.captures) or config.schedule.steps == ()
    return has_steps and any(role.enable for role in plan.roles)


def plan_of(config: ProfilingConfig, steps: int | None = None) -> Plan:
    """Return the plan of a configuration.

    Args:
        config: The configuration.
        steps: Number of the loop's last step, if known.
    """
    roles = list(map(_role_plan, map(config.for_role, _roles(config))))
    settings = dict(_changed(config.to_dict(), ProfilingConfig().to_dict()))
    captures, warm_ups, more = planned_captures(config.schedule, steps)
    if not config.enable:
        return Plan(settings=settings, enable=False)
    listed = config.schedule.steps or ()
    return Plan(
        settings=settings,
        enable=True,
        schedule=config.schedule.in_words(),
        captures=captures,
        more=more,
        warm_ups=warm_ups,
        never=[step for step in listed if steps is not None and step > steps],
        keep_last=config.limits.keep_last,
        noticed_from=_noticed_from(config.watch),
        cautions=config.cautions(),
        roles=roles,
    )


def _noticed_from(watch: WatchOptions) -> dict[float, float]:
    if not watch.enable or watch.trigger is None or watch.trigger.slow_stage is None:
        return {}
    return {spread: noticed_from(watch.trigger.slow_stage, spread) for spread in _SPREADS}


def _role_plan(role: RoleConfig) -> RolePlan:
    stages, runs = None, 1
    if role.mode == "discrete":
        stages = sorted(role.stages or ())
        if role.role == ROLLOUT_ROLE:
            stages = [ROLLOUT_ROLE]
        runs = len(stages)
    files = sum(bool(tool.suffix) for tool in role.tools)
    ranks = len(role.ranks or ())
    selected = {"ranks": role.ranks, **role.coordinates, "replicas": role.replicas}
    return RolePlan(
        role=role.role,
        enable=role.enable,
        mode=role.mode,
        workers={
            name: sorted(numbers) for name, numbers in selected.items() if numbers is not None
        },
        stages=stages,
        files={tool.name: _files(tool, role) for tool in role.tools},
        most_files=ranks * runs * files or None,
    )


def _files(tool: Tool, settings: RoleConfig) -> str:
    if not tool.suffix:
        return "none; its spans are in manifest.json"
    owner = "worker"
    if settings.role == ROLLOUT_ROLE:
        owner = "replica" if tool.starts_process else "rank of each replica"
    if settings.mode == "discrete":
        owner += " and stage, each time that it runs"
    later = "; collected after the run" if tool.starts_process else ""
    return f"one *{tool.suffix} per {owner}{later}"


def _roles(config: ProfilingConfig) -> list[str]:
    named = list(dict.fromkeys([*(config.select.roles or ()), *config.roles]))
    return named if config.select.roles is not None else [*named, ""]


def _lines(plan: Plan, steps: int | None) -> Iterator[str]:
    """Yield the plan as text."""
    yield "settings (the others are the defaults)"
    for key, value in plan.settings.items():
        yield f"  {key} = {msgspec.json.encode(value).decode()}"
    if not plan.enable:
        yield "  enable = false: nothing is captured"
        return
    yield f"captures ({plan.schedule})"
    for line in _capture_lines(plan, steps):
        yield f"  {line}"
    if plan.noticed_from:
        ratios = [
            f"{ratio:.1f} times where it varies by {spread:.0%}"
            for spread, ratio in plan.noticed_from.items()
        ]
        yield (
            f"watch: a stage that becomes slow is noticed within 8 steps from {', '.join(ratios)}"
        )
    for caution in plan.cautions:
        yield f"caution: {caution}"
    other_roles = "every other role" if plan.roles[1:] else "every role"
    for role in plan.roles:
        yield f"role {role.role}" if role.role else other_roles
        for line in _role_lines(role):
            yield f"  {line}"


def _capture_lines(plan: Plan, steps: int | None) -> Iterator[str]:
    for first, last in plan.captures[:MOST_CAPTURES]:
        numbers = f"step {first}" if first == last else f"steps {first} to {last}"
        yield f"{numbers:<20}  {step_folder_name(first)}/"
    if plan.more:
        yield "... and more" + ("; --steps N sets the last step" if steps is None else "")
    elif len(plan.captures) > MOST_CAPTURES:
        folder = step_folder_name(plan.captures[-1][0])
        yield f"... {len(plan.captures)} captures in all, the last in {folder}/"
    if not plan.captures:
        yield "none" + (f" up to step {steps}" if steps is not None else "")
    if plan.warm_ups:
        yield f"warm-up, discarded: {step_list(plan.warm_ups)}"
    if plan.never:
        yield f"never come in {steps} steps: {step_list(plan.never)}"
    if plan.keep_last is not None:
        yield f"kept on disk: the last {plan.keep_last}"


def _role_lines(role: RolePlan) -> Iterator[str]:
    """Yield lines on a role: mode, workers, stages and files,
    with their number where it is known.
    """
    if not role.enable:
        yield "not captured"
        return
    workers = [f"{name} {_numbers(numbers)}" for name, numbers in role.workers.items()]
    yield f"mode     {role.mode}"
    yield f"workers  {'; '.join(workers) or 'all'}"
    if role.stages is not None and role.role == ROLLOUT_ROLE:
        yield "stages   from on_rollout_begin to on_rollout_end"
    elif role.stages is not None:
        yield f"stages   {', '.join(role.stages) or 'all'}"
    label = "files"
    for tool, files in role.files.items():
        yield f"{label:<8} {tool}: {files}"
        label = ""
    if role.most_files is not None:
        once = ", if every stage runs once" if role.stages is not None else ""
        yield f"         at most {role.most_files} for each capture{once}"


def load_config(path: Path) -> ProfilingConfig:
    """Read a configuration: YAML or JSON, or the ``run.json`` of a run.

    The settings may be under a key ``profiling`` or ``config``. Hydra's ``defaults`` list is
    ignored; missing settings get the package's defaults.

    Raises:
        ConfigError: The file cannot be read, or the settings are wrong.
    """
    try:
        values: Any = _decode(path)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, ImportError) as error:
        raise ConfigError(str(path), f"cannot be read: {' '.join(str(error).split())}") from error
    for key in ("profiling", "config"):
        if isinstance(values, Mapping) and isinstance(values.get(key), Mapping):
            values = values[key]
    if not isinstance(values, Mapping | None):
        raise ConfigError(str(path), f"must be a mapping, is {type(values).__name__}")
    if values is not None:
        values = dict(values)
        values.pop("defaults", None)
    return ProfilingConfig.from_any(values)


def _decode(path: Path) -> Any:
    data = read_small(path.resolve())
    if path.suffix == ".json":
        return msgspec.json.decode(data)
    return msgspec.yaml.decode(data)


def _numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text with ranges, e.g. ``0, 8-15``."""
    runs: list[list[int]] = []
    for number in numbers:
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
