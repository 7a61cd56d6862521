"""The watch in the process of the training loop: it summarizes every step from the stages of all
processes.

The loop's thread records the begin and end of steps. A background thread reads the workers' stages
with a timeout, makes the summaries, and passes them to the detector and the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

from verl_profiling import clock
from verl_profiling.capture.session import process_session
from verl_profiling.controller.hang_watch import HangWatch, report_to_rank_0
from verl_profiling.controller.judgement import judge
from verl_profiling.controller.rank_summaries import RankSummaries
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.spmd import Ranks
from verl_profiling.controller.start_up import StartUp
from verl_profiling.controller.watched_workers import WatchedWorkers, times_of
from verl_profiling.files.run_files import HANGS
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import finite_numbers
from verl_profiling.settings.config import WatchOptions
from verl_profiling.watch.collectives import RecorderReading, with_lateness
from verl_profiling.watch.experiment_trackers import RunLogs
from verl_profiling.watch.log_writer import Listener, Log
from verl_profiling.watch.process_sums import (
    STAGES_OF_A_STEP,
    StageSums,
)

logger = logging.getLogger(__name__)

LOOP = RankUse(lane="controller", role="controller")
"""The loop's process, as step summaries name it, unless it is one of several ranks."""

MOST_WAITING = 1_000
"""Maximum number of ended steps that wait for their summary, unless ``watch.steps`` is larger.

They take some megabytes. A loop of short steps ends hundreds of steps before the watch's thread
gets the interpreter.
"""

LEAST_PAUSE_S = 1.0
"""Time (s) after which the workers are read,
even if fewer steps than ``watch.every`` have ended.
"""


class Watch:
    """Follows the loop, and summarizes every step.

    Args:
        options: The settings ``watch``.
        roster: The callback's workers.
        timeout_s: Seconds for which a step's summary waits for replies of workers.

    Attributes:
        options: The settings ``watch``.
        roster: The callback's workers.
        who: The loop's process, as step summaries name it.
        sums: The stages of the loop's process, in every step.
        summaries: The summaries of the last steps.
        listeners: Called with every summary on the watch's thread, once all workers have replied or
            the timeout is over.
        recorders: Chooses the steps in which torch's flight recorders are read.
        step: The current step of the loop; ``None`` between steps.
        background: Stages of the loop that overlap the steps, such as generation in the background.
        logs: Receives the summaries, once there is a run's folder.
        hangs: Detects a step that hangs; ``None`` in a process that does not log the steps.
    """

    def __init__(self, options: WatchOptions, roster: Roster, timeout_s: float) -> None:
        self.sums = StageSums(options.steps * STAGES_OF_A_STEP)
        self.summaries: deque[StepSummary] = deque(maxlen=options.steps)
        self.listeners: list[Listener] = []
        self.recorders = RecorderReading()
        self.options = options
        self._timeout_s = timeout_s
        self._until_s = inf
        self.roster = roster
        self._workers = WatchedWorkers(roster)
        self.hangs: HangWatch | None = None
        self._ranks: RankSummaries | None = None
        self.who = LOOP
        self.logs: RunLogs | None = None
        self._engines: set[str] = set()  # lanes of those that have generated
        self.step: StepSummary | None = None
        self._ended: deque[StepSummary] = deque(maxlen=max(options.steps, MOST_WAITING))
        self._left_out = 0
        self._most_ended = min(options.every or inf, options.steps)
        self._is_due = False
        self._next_s = time.monotonic() + LEAST_PAUSE_S
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.background: tuple[str, ...] = ()
        self._failed: set[int] = set()
        self._start_up = StartUp()

    def begin_with(self, ranks: Ranks, own: WorkerIdentity) -> None:
        """Set up the watch of one rank of several: the loop and the workers of this process are one
        lane.

        Args:
            ranks: The connection to the other ranks.
            own: This rank's identity in manifests.
        """
        self._ranks = RankSummaries(ranks, self.options.steps) if self.options.every else None
        process_session().keep_every_step(self.options)
        before, self.sums = self.sums, process_session().sums or self.sums
        self.sums.ended.extend(before.ended)
        self.who = RankUse(lane=own.lane(), role=own.role, rank=own.rank)
        self._workers.alone = False
        if self.hangs is not None:
            self.hangs.ranks = ranks
        else:
            report_to_rank_0(ranks, self.who, self.sums)

    def log_into(self, run: Path, publish: Callable[[], object]) -> None:
        """Write the summaries into the run's folder until training ends.

        Args:
            run: The run's folder on this host.
            publish: Function that uploads its files, if the run is behind a URL.
        """
        self._start_up.run = run
        self.logs = RunLogs(run, self.options.sinks or ())
        self.hangs = HangWatch(self, run / HANGS, self.logs, publish)

    def step_begins(self, step: int, policy_version: int | None = None) -> None:
        """Record the begin of a step and the end of the previous step."""
        self._ended.extend(self._start_up.end(step, self.sums))
        self.step = StepSummary(step=step, begin_ns=clock.now_ns(), policy_version=policy_version)
        if self.hangs is not None:
            self.hangs.step_begins()

    def no_step(self) -> None:
        """Discard the step that began last, because the loop had no more batches."""
        self.step = None

    def capture_begins(self, folder: str) -> None:
        """Mark the step as captured, and begin it anew: the start of the capture is no part of it.

        Args:
            folder: Name of the step folder; empty for a warm-up.
        """
        if self.step is not None:
            self.step.captured = folder
            self.step.begin_ns = clock.now_ns()

    def takes(self, metrics: Mapping[str, Any] | None) -> None:
        """Note the metrics ``samples`` and ``tokens``: how much data the open step trained on."""
        # dict comes first: a check against an abstract class is slow, in a hook of every step.
        if self.step is None or not isinstance(metrics, (dict, Mapping)):
            return
        taken = {name: metrics[name] for name in ("samples", "tokens") if name in metrics}
        if taken:
            numbers, _ = finite_numbers(taken)
            self.step.taken = max(0, int(numbers.get("samples", 0)))
            self.step.taken_tokens = max(0, int(numbers.get("tokens", 0)))

    def step_ends(self, end_ns: int = 0) -> None:
        """End a step, by default now, and read the workers in the background if due."""
        step, self.step = self.step, None
        if step is None:
            return
        step.end_ns = end_ns or clock.now_ns()
        step.background = self.background
        if len(self._ended) == self._ended.maxlen:  # the loop is faster than its watch
            self._left_out += 1
        self._ended.append(step)
        is_due = len(self._ended) >= self._most_ended or time.monotonic() >= self._next_s
        if is_due and not step.captured:
            self.read()

    def train_ends(self, timeout_s: float) -> None:
        """Read the workers for the last time, and wait until all summaries are made."""
        if self.hangs is not None and self.step is not None and self.step is self.hangs.hanging:
            self.hangs.is_left = True
            self.step = None
        self.step_ends()
        self._until_s = time.monotonic() + timeout_s
        self.read()
        if (thread := self._thread) is not None:
            thread.join(timeout_s + 2 * LEAST_PAUSE_S)
        elif self._is_due:  # at exit, Python 3.12 starts no thread
            self._run()
        if self._ranks is not None and not self._ranks.leads:
            self._ranks.send([])
        if self.hangs is not None:
            self.hangs.end()
        self._ranks = self.hangs = None
        self._until_s = inf

    def read(self) -> None:
        """Read the workers, and summarize the ended steps, on the background thread."""
        with self._lock:
            self._is_due = True
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="verl-profiling-watch", daemon=True
                )
                with suppress(RuntimeError):  # at exit
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            steps = [self._ended.popleft() for _ in range(len(self._ended))]
            left_out, self._left_out = self._left_out, 0
            if left_out:
                logger.warning(
                    "watch: %d steps before step %d have no summary: steps ended faster "
                    "than they were read",
                    left_out,
                    steps[0].step,
                )
            try:
                self._summarize(steps)
            except Exception as error:
                self._say_once(id(Watch), steps[0].step if steps else 0, error)
            self._next_s = time.monotonic() + LEAST_PAUSE_S

    def _summarize(self, steps: list[StepSummary]) -> None:
        """Read the processes' stages in these steps, and pass the summaries to the listeners."""
        since_s = time.monotonic()

        def left_s() -> float:
            soon_s = max(self._until_s, since_s + LEAST_PAUSE_S)
            return min(since_s + self._timeout_s, soon_s) - time.monotonic()

        self._read(steps, left_s)
        if self._ranks is not None:
            steps = self._ranks.exchanged(steps, left_s)
        summaries = [with_lateness(step) for step in self._start_up.written(steps)]
        roles = {target.roles[0] for target in self.roster.targets}
        for _, alike in groupby(summaries, key=_lanes):
            judge([*alike], bool(roles), roles, self._engines)
        for summary in summaries:
            self.summaries.append(summary)
            if self.options.trigger is not None:
                self.recorders.follow(summary)
            for listener in [*self.listeners]:
                self._pass_to(listener, summary)
        if summaries and self.logs is not None:  # what the listeners added is logged
            self._pass_to(self.logs, *summaries)
        if self._ranks is not None and self._ranks.leads:
            self._ranks.request_collectives(self.recorders.due)

    def _pass_to(self, listener: Log, *summaries: StepSummary) -> None:
        try:
            listener(*summaries)
        except Exception as error:  # an error of a listener does not stop the watch
            self._say_once(id(listener), summaries[0].step, error)

    def _read(self, steps: Sequence[StepSummary], left_s: Callable[[], float]) -> None:
        """Read the stages of the loop and of the workers into the steps."""
        ranks = self._ranks
        # The loop is read first, as a worker may share its stages.
        uses = self.sums.of_steps(
            self.who, times_of(steps), collectives=ranks is not None and ranks.collectives
        )
        for step, use in zip(steps, uses, strict=True):
            step.loop = [] if use is None else [use]
        to_read = [step for step in steps if self.options.every or step.captured]
        if to_read:
            reports = None if self.hangs is None else self.hangs.told
            self._workers.read(to_read, ranks is None and self.recorders.due, reports, left_s)

    def _say_once(self, what: int, step: int, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            logger.error(
                "watch: step %d: %s: %s", step, type(error).__name__, error, exc_info=error
            )


def _lanes(summary: StepSummary) -> tuple[tuple[str, ...], list[str]]:
    return summary.background, [*map(attrgetter("lane"), summary.processes)]
