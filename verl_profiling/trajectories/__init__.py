"""What one trajectory of a rollout does, as spans; and how late the event loop runs that serves it."""

from verl_profiling.trajectories.spans import (
    Span,
    Trajectory,
    count,
    current_trajectory,
    span,
    trajectory,
    trajectory_fate,
)

__all__ = ["Span", "Trajectory", "count", "current_trajectory", "span", "trajectory", "trajectory_fate"]
