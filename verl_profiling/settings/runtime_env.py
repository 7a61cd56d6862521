"""How workers are started if their tool has to start the process (Nsight Systems)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE, safe_name
from verl_profiling.settings.config import ProfilingConfig, RoleConfig
from verl_profiling.settings.schedule import Schedule

__all__ = ["expected_ranges", "worker_runtime_env"]


def worker_runtime_env(
    config: ProfilingConfig | Mapping[str, Any] | None, *, role: str, last_step: int | None = None
) -> dict[str, Any]:
    """Return the Ray runtime environment that starts a worker under its tool.

    ``Worker.options(runtime_env=nsys_runtime_env(config, role="actor", last_step=100)).remote(...)``.
    It is empty if no tool of the role has to start the process.

    Args:
        config: The same settings as the callback's.
        role: Role of the worker.
        last_step: Number of the loop's last step; only needed for a schedule without an end.

    Raises:
        ConfigError: The settings are wrong, or do not say how many ranges there will be.
        ToolUnavailableError: The tool is not on this machine.
    """
    settings = ProfilingConfig.from_any(config)
    chosen = settings.for_role(role)
    tool = chosen.launched_tool
    if not chosen.enable or tool is None or tool.launch is None:
        return {}
    ranges = expected_ranges(chosen, settings.schedule, last_step)
    output = settings.local_folder / tool.name / safe_name(role)
    environment = tool.launch.runtime_env(output, ranges, forks=role == ROLLOUT_ROLE)
    output.parent.mkdir(parents=True, exist_ok=True)
    return environment


def expected_ranges(role: RoleConfig, schedule: Schedule, last_step: int | None = None) -> int:
    """Return how many ranges a worker will open: after that many, its tool stops listening.

    A rollout engine opens one range per step; in discrete mode one per generation, of which one per
    step is expected.

    Args:
        role: Settings of the worker's role.
        schedule: The schedule.
        last_step: Number of the loop's last step.

    Raises:
        ConfigError: The number cannot be computed.
    """
    tool = role.launched_tool
    if tool is not None and tool.launch is not None and tool.launch.range_count is not None:
        return tool.launch.range_count
    name = tool.name if tool is not None else "the tool"
    if (last := schedule.last_step(last_step)) is None:
        raise ConfigError(
            "schedule",
            "has no end, so the number of ranges is unknown; pass last_step, or set repeat or steps",
        )
    ranges = {step: schedule.step_range(step) for step in range(last + 1)}
    captures = {step: captured for step, captured in ranges.items() if captured is not None}
    if role.mode == "e2e":
        count = len({captured.first for captured in captures.values()})
    elif role.role == ROLLOUT_ROLE:
        count = len(captures)
    elif role.stages is None:
        raise ConfigError(
            "select.stages",
            f"must list the stages, so that the number of ranges is known; or set tools.{name}.ranges",
        )
    else:
        count = len(captures) * len(role.stages)
    if not count:
        raise ConfigError("schedule", f"captures no step up to step {last}, so {name} would record nothing")
    return count
