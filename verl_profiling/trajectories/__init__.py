"""Trajectories of a rollout, as spans; and the lag of the event loop that serves them."""

from verl_profiling.trajectories.spans import (
    Span,
    Trajectory,
    count,
    current_trajectory,
    span,
    trajectory,
    trajectory_status,
)

__all__ = ["Span", "Trajectory", "count", "current_trajectory", "span", "trajectory", "trajectory_status"]
