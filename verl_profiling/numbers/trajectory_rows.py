"""The rows of trajectories in the picture of a step: what each one waited for, over time."""

from __future__ import annotations

from collections.abc import Iterator

from verl_profiling.numbers.report_columns import GanttSpan
from verl_profiling.steps.read import Content
from verl_profiling.steps.trajectory_columns import Trajectory
from verl_profiling.units import shortened

MOST_ROWS = 64
"""Maximum number of rows, which fill a screen; with more trajectories, each group has one row."""


def trajectory_gantt(content: Content) -> Iterator[GanttSpan]:
    """Yield what each trajectory waited for: its causes, in lanes named by group and sample.

    With too many trajectories, the last one of each group stands for its group; of too many groups,
    the last ones are shown.
    """
    shown = _shown(content.records.trajectories)
    pieces = content.pieces
    columns = (pieces.owner.tolist(), pieces.begin.tolist(), pieces.end.tolist())
    step_ns = content.step.begin_ns
    for owner, begin, end, cause in zip(*columns, pieces.cause.tolist(), strict=True):
        if owner in shown:
            yield GanttSpan(
                lane=shown[owner],
                name=pieces.causes[cause],
                begin_us=(begin - step_ns) / 1000,
                end_us=(end - step_ns) / 1000,
                depth=0,
            )


def _shown(trajectories: list[Trajectory]) -> dict[int, str]:
    """Return the names of the trajectories that have a row, by index."""
    order = sorted(range(len(trajectories)), key=lambda index: -trajectories[index].end_ns)
    shown: dict[int, str] = {}
    groups: set[str] = set()
    for index in order:
        said = trajectories[index].said
        name = f"trajectory {shortened(said.group)}/{said.sample}"
        if len(trajectories) > MOST_ROWS:
            if said.group in groups or len(groups) == MOST_ROWS:
                continue
            groups.add(said.group)
            name += ", last of its group"
        shown[index] = name
    return shown
