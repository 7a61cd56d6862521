"""Starts Ray workers under Nsight Systems, which records ranges of a process.

A range is the time from a start of CUDA's profiler to its stop.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.files.opener import make_folder
from verl_profiling.identity import ROLLOUT_ROLE, safe_name
from verl_profiling.manifest import NSYS_FOLDER
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.roles import RoleConfig
from verl_profiling.settings.schedule import Schedule
from verl_profiling.tools.nsys import _MISSING, NsysOptions, nsys_variables


def nsys_runtime_env(
    config: ProfilingConfig | Mapping[str, Any] | None, *, role: str, last_step: int | None = None
) -> dict[str, Any]:
    """Return the Ray runtime environment that starts a worker under Nsight Systems.

    ``Worker.options(runtime_env=nsys_runtime_env(config, role="actor",
    last_step=100)).remote(...)``. The environment is empty for a role without tool ``nsys``.

    Args:
        config: The same settings as the callback's.
        role: Role of the worker.
        last_step: Number of the loop's last step; only needed for a schedule without an end.

    Raises:
        ConfigError: The settings are wrong, or leave the number of ranges open (see
            :func:`expected_ranges`).
        ToolUnavailableError: There is no ``nsys`` on this machine.
    """
    settings = ProfilingConfig.from_any(config)
    chosen = settings.for_role(role)
    if not chosen.enable or chosen.launched_tool is None:
        return {}
    ranges = expected_ranges(chosen, settings.schedule, last_step)
    if shutil.which("nsys") is None:
        raise ToolUnavailableError(_MISSING)
    options: NsysOptions = chosen.launched_tool.options
    output = settings.local_folder / NSYS_FOLDER / safe_name(role)
    make_folder(output.parent)
    return {
        "nsight": {
            "t": ",".join(options.trace),
            # For the shell command of Ray; a quoted path would not count as absolute.
            "o": re.sub(r"([^\w/.%+-])", r"\\\1", f"{output}.%p"),
            "cuda-graph-trace": "graph",
            "sample": "none",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": f"repeat-shutdown:{ranges}",
            "kill": "none",
            "force-overwrite": "true",  # a report of an earlier process with the same id
            **({"trace-fork-before-exec": "true"} if role == ROLLOUT_ROLE else {}),
            **options.arguments,
        },
        "env_vars": nsys_variables(output, ranges),
    }


def expected_ranges(role: RoleConfig, schedule: Schedule, last_step: int | None = None) -> int:
    """Return the number of ranges that a worker opens; Nsight Systems records no further ranges.

    In e2e mode, a worker opens one range per capture. In discrete mode, it opens one per step and
    selected stage; an engine opens one per generation, of which one per step is expected.

    Args:
        role: Settings of the worker's role.
        schedule: The settings ``schedule``.
        last_step: Number of the loop's last step; ``None`` if the schedule has an end.

    Raises:
        ConfigError: The number does not follow from these settings, or is 0.
    """
    if role.launched_tool is not None and role.launched_tool.options.ranges is not None:
        return int(role.launched_tool.options.ranges)
    if (last := schedule.last_step(last_step)) is None:
        raise ConfigError(
            "schedule",
            "has no end, so the number of ranges is unknown; pass last_step, or set repeat "
            "or steps",
        )
    captures = [
        captured for step in range(last + 1) if (captured := schedule.step_range(step)) is not None
    ]
    if role.mode == "e2e":
        count = len({captured.first for captured in captures})
    elif role.role == ROLLOUT_ROLE:
        count = len(captures)
    elif role.stages is None:
        raise ConfigError(
            "select.stages",
            "must list the stages, so that the number of ranges is known; or set tools.nsys.ranges",
        )
    else:
        count = len(captures) * len(role.stages)
    if not count:
        raise ConfigError(
            "schedule", f"captures no step up to step {last}, so nsys would record nothing"
        )
    return count
