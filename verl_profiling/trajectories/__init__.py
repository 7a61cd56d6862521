"""Trajectories of a rollout, their spans, and the lag of their event loops."""

from verl_profiling.trajectories.spans import (
    Span,
    Trajectory,
    count,
    current_trajectory,
    span,
    trajectory,
    trajectory_status,
)

__all__ = [
    "Span",
    "Trajectory",
    "count",
    "current_trajectory",
    "span",
    "trajectory",
    "trajectory_status",
]
