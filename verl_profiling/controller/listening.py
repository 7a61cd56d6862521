"""From the begin of training to its end: the ways in which people and the watch may ask for captures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from verl_profiling.aim import Aim
from verl_profiling.controller.ahead import AnnouncedByRank0, Announcing
from verl_profiling.controller.anomalies import Anomalies, SlowHere
from verl_profiling.controller.asked_by_signal import SignalAsking
from verl_profiling.controller.control_actor import ControlActor
from verl_profiling.controller.control_folder import ControlFolder
from verl_profiling.controller.decision import Asker, Decisions
from verl_profiling.controller.demands import Demands
from verl_profiling.controller.inbox import Inbox
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.run import Run
from verl_profiling.controller.spmd import Ranks, place_of
from verl_profiling.controller.step_folder import StepFolders
from verl_profiling.controller.told_steps import Hearing, Telling
from verl_profiling.controller.watch import Listener, Watch
from verl_profiling.demand import LoopState
from verl_profiling.identity import ProcessId
from verl_profiling.ranks import process_rank
from verl_profiling.ray_cluster import in_cluster
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
        self._listeners: list[tuple[list[Listener], Listener]] = []
        self._signal: SignalAsking | None = None
        self._inboxes: list[Inbox] = []
        self.complete = False

    def begin(self) -> None:
        """Begin to listen; where several ranks run the loop, rank 0 does."""
        if not self._config.watch.enable or self._signal is not None:
            return
        rank, ranks = (process_rank() or (0, 1)) if self._together else (0, 1)
        if rank:
            self._signal = SignalAsking(_ask_rank_0)
            self._signal.begin()
            return
        check = partial(self._roster.check_aim, ranks=ranks if ranks > 1 else None)
        demands = Demands(self._config.schedule, check)
        self._add(demands)
        self._let_the_watch_ask(check)
        self._signal = SignalAsking(demands.signal)
        self._signal.begin()
        try:
            run = self._folders.run
        except OSError as error:
            logger.warning("captures cannot be asked for in the run's folder: %s", error)
            return
        remote = run.remote
        place = remote.url if remote is not None else str(run.path.absolute())
        state = LoopState(process=ProcessId.current(), run_id=run.run_id, place=place)
        self._inboxes = list(self._opened(run))
        for inbox in self._inboxes:
            demands.open(inbox, state)

    def _opened(self, run: Run) -> Iterator[Inbox]:
        """Yield the ways in which people reach the loop, and say which they are."""
        ways = []
        if run.remote is None:
            try:
                yield ControlFolder(run.path)
                ways.append(f"verl-profiling trigger {run.path}")
            except OSError as error:
                logger.warning("captures cannot be asked for in the run's folder: %s", error)
        if (inbox := self._through_ray(run)) is not None:
            yield inbox
            ways.append(f"verl-profiling trigger --ray {run.run_id}")
        logger.info("captures are asked for with %s", " or ".join((*ways, "SIGUSR2")))

    def _through_ray(self, run: Run) -> ControlActor | None:
        """Return an actor to ask, if there is to be one."""
        wanted = self._config.watch.ray
        if not (run.remote is not None if wanted is None else wanted):
            return None
        try:
            if in_cluster():
                return ControlActor(run.run_id)
            if wanted:
                logger.warning("captures cannot be asked for through Ray: this process is in no cluster")
        except Exception as error:  # Ray has errors of its own
            logger.warning("captures cannot be asked for through Ray: %s: %s", type(error).__name__, error)
        return None

    def together(self, ranks: Ranks | None) -> None:
        """Listen together with the other ranks of the loop, if it has any."""
        self.complete = ranks is not None or not self._together
        if ranks is None:
            return
        if self._watch is not None:
            self._watch_together(self._watch, ranks)
        if ranks.leads:
            self._decisions.ahead = Announcing(ranks, self._decisions.refused)
        else:
            self._add(AnnouncedByRank0(ranks))

    def end(self) -> None:
        """Listen no more; the next begin of training may."""
        if self._signal is not None:
            self._signal.end()
        for asker in self._added:
            self._decisions.askers.remove(asker)
        self._added = []
        for listeners, listener in self._listeners:
            listeners.remove(listener)
        self._listeners = []
        self._signal = self._decisions.ahead = None
        self.complete = False

    @property
    def _together(self) -> bool:
        return place_of(self._config, self._roster.targets) is not None

    def _add(self, asker: Asker) -> None:
        """Add somebody who comes before the watch."""
        self._added.append(asker)
        self._decisions.askers.insert(0, asker)

    def _watch_together(self, watch: Watch, peers: Ranks) -> None:
        """Account for this process as a rank; what looks slow here is told at once, by every rank."""
        options, patience_s = self._config.watch, self._config.timeouts.start_s
        ranks: Hearing | Telling | None = None
        if options.every and peers.leads:
            ranks = Hearing(peers, options.steps, patience_s)
        elif options.every:
            ranks = Telling(peers, options.steps)
        watch.begin_with(ranks, self._roster.identity_here())
        if options.trigger is not None:
            self._listen(watch.early, SlowHere(options.trigger, watch.read_soon).listen)

    def _listen(self, listeners: list[Listener], listener: Listener) -> None:
        listeners.append(listener)
        self._listeners.append((listeners, listener))

    def _let_the_watch_ask(self, check: Callable[[Aim], None]) -> None:
        """Let it say what it notices, and ask for captures when people do not."""
        options = self._config.watch.trigger
        if self._watch is None or options is None:
            return
        anomalies = Anomalies(options, self._watch.read_soon, check)
        if not self._together:
            self._listen(self._watch.early, anomalies.listen)
        self._listen(self._watch.listeners, anomalies.listen)
        self._added.append(anomalies)
        self._decisions.askers.append(anomalies)


def _ask_rank_0(name: str) -> None:
    logger.warning("%s: this rank follows rank 0, whose process is to be asked", name)
