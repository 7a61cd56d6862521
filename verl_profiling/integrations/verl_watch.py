"""Gives the numbers of the watch to verl's own trackers, while training goes on."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from verl_profiling.step_account import StepAccount
from verl_profiling.watch.values import PREFIX, values_of

__all__ = ["ONWARD_ONLY", "WatchTracking"]

logger = logging.getLogger(__name__)

ONWARD_ONLY = ("wandb", "vemlp_wandb")
"""Trackers that accept no step before the last one that they saw."""
_MOST_WAITING = 1000
_CONSOLE = "console"


class WatchTracking:
    """Keeps the accounts of steps, and logs one with each step that verl logs; at the end the rest.

    Trackers that do not accept steps before the last one that they saw get it with that one; the step that it
    is of is ``profiling/watch/step``. The console gets none.
    """

    def __init__(self) -> None:
        self._waiting: deque[StepAccount] = deque(maxlen=_MOST_WAITING)
        self._failed: set[str] = set()

    def completed(self, account: StepAccount) -> None:
        """Keep an account."""
        self._waiting.append(account)

    def log(self, tracking: Any, step: int) -> None:
        """Log one account.

        Args:
            tracking: The run's ``Tracking``.
            step: Number of the step that verl logs.
        """
        if self._waiting:
            self._log(tracking, self._waiting.popleft(), step)

    def log_rest(self, tracking: Any, step: int) -> None:
        """Log all that are left, when training has ended."""
        while self._waiting:
            self._log(tracking, self._waiting.popleft(), step)

    def _log(self, tracking: Any, account: StepAccount, step: int) -> None:
        values = {f"{PREFIX}step": account.step, **values_of(account)}
        for name, tracker in tracking.logger.items():
            if name == _CONSOLE or name in self._failed:
                continue
            try:
                tracker.log(data=values, step=step if name in ONWARD_ONLY else account.step)
            except Exception as error:
                self._failed.add(name)
                logger.warning("watch: %s gets nothing more: %s: %s", name, type(error).__name__, error)
