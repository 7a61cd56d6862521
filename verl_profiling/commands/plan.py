"""``verl-profiling plan``: prints the steps, workers,
stages and files that a configuration would capture.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.commands import EXIT_FINDING, EXIT_OK, option
from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE, step_folder_name
from verl_profiling.opener import read_small
from verl_profiling.settings.config import ProfilingConfig, RoleConfig, RoleOverride
from verl_profiling.settings.schedule import MOST_CAPTURES, planned_captures
from verl_profiling.shifts import noticed_from
from verl_profiling.tools import Tool
from verl_profiling.units import step_list

_SPREADS = (0.08, 0.15, 0.3)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Prints what a configuration would capture: all settings, the steps, the "
        "workers and stages of each role, and the files that each tool writes (of unknown size). "
        "Nothing is started. Exits 1 when nothing would be captured."
    )
    parser.epilog = "example: verl-profiling plan conf/ppo.yaml --steps 500"
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="settings, as YAML or JSON, or a run.json"
    )
    option(parser, "--steps N", "number of the loop's last step", int)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a configuration."""
    config = load_config(arguments.config)
    roles = [config.for_role(role) for role in _roles(config)]
    captures, warm_ups, more = planned_captures(config.schedule, arguments.steps)
    print("settings (the others are the defaults)")
    for key, value in _changed(config.to_dict(), ProfilingConfig().to_dict()):
        print(f"  {key} = {msgspec.json.encode(value).decode()}")
    if not config.enable:
        print("  enable = false: nothing is captured")
        return EXIT_FINDING
    print(f"captures ({config.schedule.in_words()})")
    for line in _capture_lines(captures, arguments.steps, more):
        print(f"  {line}")
    if warm_ups:
        print(f"  warm-up, discarded: {step_list(warm_ups)}")
    steps = arguments.steps
    if never := [
        step for step in config.schedule.steps or () if steps is not None and step > steps
    ]:
        print(f"  never come in {steps} steps: {step_list(never)}")
    if config.limits.keep_last is not None:
        print(f"  kept on disk: the last {config.limits.keep_last}")
    trigger = config.watch.trigger
    if config.watch.enable and trigger is not None and (ratio := trigger.slow_stage) is not None:
        each = (
            f"{noticed_from(ratio, by):.1f} times where it varies by {by:.0%}" for by in _SPREADS
        )
        print(f"watch: a stage that becomes slow is noticed within 8 steps from {', '.join(each)}")
    for caution in config.cautions():
        print(f"caution: {caution}")
    for role in roles:
        print(
            f"role {role.role}" if role.role else "every other role" if roles[1:] else "every role"
        )
        for line in _role_lines(role):
            print(f"  {line}")
    some = bool(captures) or config.schedule.steps == ()  # without steps, captures can be requested
    return EXIT_OK if some and any(role.enable for role in roles) else EXIT_FINDING


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
        values = {key: value for key, value in values.items() if key != "defaults"}
    return ProfilingConfig.from_any(values)


def _decode(path: Path) -> Any:
    data = read_small(path.resolve())
    return msgspec.json.decode(data) if path.suffix == ".json" else msgspec.yaml.decode(data)


def _capture_lines(
    captures: Sequence[tuple[int, int]], steps: int | None, more: bool
) -> Iterator[str]:
    for first, last in captures[:MOST_CAPTURES]:
        what = f"step {first}" if first == last else f"steps {first} to {last}"
        yield f"{what:<20}  {step_folder_name(first)}/"
    if more:
        yield "... and more" + ("; --steps N sets the last step" if steps is None else "")
    elif len(captures) > MOST_CAPTURES:
        yield (
            f"... {len(captures)} captures in all, the last in {step_folder_name(captures[-1][0])}/"
        )
    if not captures:
        yield "none" + (f" up to step {steps}" if steps is not None else "")


def _role_lines(role: RoleConfig) -> Iterator[str]:
    """Yield lines on a role: mode, workers, stages and files,
    with their number where it is known.
    """
    if not role.enable:
        yield "not captured"
        return
    stages, each, once = "", 1, ""
    if role.mode == "discrete" and role.role == ROLLOUT_ROLE:
        stages = "from on_rollout_begin to on_rollout_end"
    elif role.mode == "discrete":
        named = sorted(role.stages or ())
        stages, each = ", ".join(named) or "all", len(named)
    yield f"mode     {role.mode}"
    yield f"workers  {_workers(role)}"
    if stages:
        yield f"stages   {stages}"
        once = ", if every stage runs once"
    for index, tool in enumerate(role.tools):
        yield f"{'' if index else 'files':<8} {_files(tool, role)}"
    ranks = len(role.ranks) if role.ranks is not None else 0
    if most := ranks * each * sum(bool(tool.suffix) for tool in role.tools):
        yield f"         at most {most} for each capture{once}"


def _roles(config: ProfilingConfig) -> list[str]:
    named = list(dict.fromkeys([*(config.select.roles or ()), *config.roles]))
    return named if config.select.roles is not None else [*named, ""]


def _workers(settings: RoleConfig) -> str:
    chosen = {"ranks": settings.ranks, **settings.coordinates, "replicas": settings.replicas}
    given = [
        f"{name} {_numbers(numbers)}" for name, numbers in chosen.items() if numbers is not None
    ]
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
