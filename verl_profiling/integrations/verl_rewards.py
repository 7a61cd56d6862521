"""Scoring in verl's reward-loop workers: how long each sample took there, apart from the way to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from verl_profiling.capture.session import process_session
from verl_profiling.integrations.verl_actors import add_capture_methods
from verl_profiling.integrations.wrapping import wrap
from verl_profiling.trajectories import span
from verl_profiling.workers import RewardCaptureMixin

__all__ = ["hook_reward_loops"]


def hook_reward_loops(module: Any) -> None:
    """Record what ``RewardLoopWorker`` scores."""
    add_capture_methods(module.RewardLoopWorker, RewardCaptureMixin)
    wrap(module.RewardLoopWorker, "compute_score", _scored)


def _scored(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    async def score(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        with process_session().busy("reward") or nullcontext(), span("reward", **_sample_of(data)):
            return await compute_score(self, data, *args, **kwargs)

    return score


def _sample_of(data: Any) -> dict[str, Any]:
    """Return which trajectory is scored, where the batch says so."""
    columns = getattr(data, "non_tensor_batch", None) or {}
    found = {}
    for fact, name in (("group", "uid"), ("sample", "session_id")):
        column = columns.get(name)
        if column is not None and len(column):
            value = column[-1]
            found[fact] = value.item() if hasattr(value, "item") else value
    return found
