"""From the begin of training to its end: the ways in which people and the watch may ask for captures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from verl_profiling.aim import Aim
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.decision import Asker, Decisions
from verl_profiling.controller.requests import CapturesOnDemand, Requests
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.spmd import Ranks, place_of
from verl_profiling.controller.step_folder import StepFolders
from verl_profiling.controller.watch import Watch
from verl_profiling.ranks import process_rank
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Listening"]

logger = logging.getLogger(__name__)


class Listening:
    """Lets captures be asked for, where ``watch.enable`` is set.

    Args:
        config: The settings.
        roster: The workers.
        folders: The run's folder.
        decisions: Where what is asked for comes to.
        watch: What accounts for the steps; ``None`` if it is off.

    Attributes:
        complete: Whether all is done that has to be before the first step.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        roster: Roster,
        folders: StepFolders,
        decisions: Decisions,
        watch: Watch | None,
    ) -> None:
        self._config = config
        self._roster = roster
        self._folders = folders
        self._decisions = decisions
        self._watch = watch
        self._added: list[Asker] = []
        self._anomalies: Anomalies | None = None
        self._requests: Requests | None = None
        self.complete = False

    def begin(self) -> None:
        """Begin to listen; where several ranks run the loop, rank 0 does."""
        if not self._config.watch.enable or self._requests is not None:
            return
        rank, ranks = (process_rank() or (0, 1)) if self._together else (0, 1)
        self._requests = Requests(_refer_to_rank_0 if rank else None)
        self._requests.handle_signal()
        if rank:
            return
        check = partial(self._roster.check_aim, ranks=ranks if ranks > 1 else None)
        self._add(CapturesOnDemand(self._requests, self._config.schedule, check))
        self._let_the_watch_ask(check)
        try:
            run = self._folders.run
            place = run.url or str(run.path.absolute())
            self._requests.open(place)
        except OSError as error:
            logger.warning("captures cannot be asked for in the run's folder: %s", error)
        else:
            logger.info("captures are asked for with verl-profiling trigger %s or SIGUSR2", place)

    def together(self, ranks: Ranks | None) -> None:
        """Listen together with the other ranks of the loop, if it has any."""
        self.complete = ranks is not None or not self._together
        self._decisions.ranks = ranks
        if ranks is not None and self._watch is not None:
            self._watch.begin_with(ranks, self._roster.identity_here())

    def end(self) -> None:
        """Listen no more; the next begin of training may."""
        if self._requests is not None:
            self._requests.end()
        for asker in self._added:
            self._decisions.askers.remove(asker)
        self._added = []
        if self._watch is not None and self._anomalies is not None:
            self._watch.listeners.remove(self._anomalies.listen)
        self._anomalies = self._requests = self._decisions.ranks = None
        self.complete = False

    @property
    def _together(self) -> bool:
        return place_of(self._config, self._roster.targets) is not None

    def _add(self, asker: Asker) -> None:
        self._added.append(asker)
        self._decisions.askers.append(asker)

    def _let_the_watch_ask(self, check: Callable[[Aim], None]) -> None:
        """Let it say what it notices, and ask for captures when people do not."""
        options = self._config.watch.trigger
        if self._watch is None or options is None:
            return
        self._anomalies = Anomalies(options, check)
        self._watch.listeners.append(self._anomalies.listen)
        self._add(self._anomalies)


def _refer_to_rank_0() -> None:
    logger.warning("SIGUSR2: this rank follows rank 0, whose process is to be asked")
