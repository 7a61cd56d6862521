"""The numbers of the watch in verl's own trackers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from drawn_summaries import summary

from verl_profiling import ProfilingCallback
from verl_profiling.integrations.verl.profiler import Profiler


class Tracker:
    def __init__(self) -> None:
        self.logged: list[tuple[int, float]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        """Keep the step that it is called by, and the one that it is of."""
        self.logged.append((step, data["profiling/watch/step"]))


def profiler() -> Profiler:
    """Return the profiler of a trainer that has not begun to train."""
    callback = ProfilingCallback({"enable": True})
    return Profiler(None, callback.config, callback)


def test_one_account_goes_with_each_step_of_verl_and_the_rest_at_the_end() -> None:
    """Each under its own step; where steps only go onward, with the last one.
    The console gets none.
    """
    trackers = {name: Tracker() for name in ("console", "tensorboard", "wandb")}
    tracking = SimpleNamespace(logger=trackers)
    watched = profiler()
    watched.logged(tracking, {}, 9)
    for number in (1, 2, 3):
        watched.summaries.append(summary(number))
    watched.logged(tracking, {}, 10)
    watched.logged(tracking, {}, 11)
    watched.log_rest()
    assert trackers["tensorboard"].logged == [(1, 1), (2, 2), (3, 3)]
    assert trackers["wandb"].logged == [(10, 1), (11, 2), (11, 3)]
    assert trackers["console"].logged == []
