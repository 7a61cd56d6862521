"""The watch in the loop's process: a summary of every step, made from the stages of all processes.

The loop's thread records when steps begin and end. One background thread reads the stages of the workers
with a timeout, makes the summaries, and passes them to the detector and the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from math import inf

import msgspec

from verl_profiling import clock
from verl_profiling.capture.stage import Both, StageSink
from verl_profiling.controller.open_capture import ROLLOUT
from verl_profiling.controller.rank_summaries import RankSummaries
from verl_profiling.controller.spmd import Ranks
from verl_profiling.controller.targets import Roster
from verl_profiling.controller.watched_workers import PendingStep, WatchedWorkers
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.watch import WatchOptions
from verl_profiling.step_summary import RankUse, StepSummary
from verl_profiling.watch.collectives import RecorderReading, with_collectives, with_lateness
from verl_profiling.watch.exposed import exposed
from verl_profiling.watch.sums import STAGES_OF_A_STEP, OpenStage, StageSums, process_sums

logger = logging.getLogger(__name__)

Listener = Callable[[StepSummary], object]

LOOP = RankUse(lane="controller", role="controller")
"""The process that runs the loop."""

LEAST_PAUSE_S = 1.0
PAUSE = 1000
"""Pause between two reads of the workers, as a multiple of a read's CPU time, e.g. 2 s after 2 ms. After it,
the workers are read even if fewer steps than ``watch.every`` have ended."""

_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0


class Watch:
    """Follows the loop, and summarizes every step.

    Args:
        options: The settings.
        roster: The workers.
        timeout_s: How long a step's summary waits for replies of workers.

    Attributes:
        sums: The stages of the loop's process.
        summaries: The summaries of the last steps.
        listeners: Called with every summary on the watch's thread, once all workers have replied or the
            timeout is over.
        recorders: Whether torch's flight recorders are read.
    """

    def __init__(self, options: WatchOptions, roster: Roster, timeout_s: float) -> None:
        most = options.steps * STAGES_OF_A_STEP
        self.sums = StageSums(most)
        self.summaries: deque[StepSummary] = deque(maxlen=options.steps)
        self.listeners: list[Listener] = []
        self._every, self._steps, self._most = options.every, options.steps, most
        self._timeout_s, self._until_s = timeout_s, inf
        self._workers = WatchedWorkers(roster)
        self._ranks: RankSummaries | None = None
        self.recorders = RecorderReading()
        self._has_trigger = options.trigger is not None
        self._who = LOOP
        self._step: PendingStep | None = None
        self._ended: deque[PendingStep] = deque()
        self._pending: deque[PendingStep] = deque()
        self._next_s = time.monotonic() + LEAST_PAUSE_S
        self._at_once = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._rollout: OpenStage | None = None
        self._beside: tuple[str, ...] = ()
        self._failed: set[int] = set()

    def begin_with(self, ranks: Ranks, own: WorkerIdentity) -> None:
        """Summarize this process as one of the ranks of a loop: the loop and its workers here are one lane.

        Args:
            ranks: The ranks.
            own: This rank's identity in manifests.
        """
        self._ranks = RankSummaries(ranks, self._steps) if self._every else None
        self.sums = process_sums(self._most)
        self._who = RankUse(lane=own.lane(), role=own.role, rank=own.rank)
        self._workers.alone = False

    def receiver(self, log: StageSink | None) -> StageSink:
        """Return the receiver of this process's stages: the watch, together with a capture's log if given."""
        return self.sums if log is None else Both(log, self.sums)

    def step_begins(self, step: int, policy_version: int | None = None) -> None:
        """Record that a step begins; ends the previous step if the loop did not."""
        self.step_ends()
        self._step = PendingStep(step, clock.now_ns(), policy_version=policy_version)

    def no_step(self) -> None:
        """Discard the step that began last: the loop had no batch left for it."""
        self._step = None

    def capture_begins(self, folder: str) -> None:
        """Record that the step is captured; the time to start the capture is not part of the step."""
        if self._step is not None:
            self._step.captured = folder
            self._step.begin_ns = clock.now_ns()

    def step_ends(self) -> None:
        """Record that a step ends, and read the workers in the background if a read is due."""
        step, self._step = self._step, None
        if step is None:
            return
        if not self._beside:  # a rollout that the loop has not ended ends with the step
            self.rollout_ends()
        step.end_ns = clock.now_ns()
        self._ended.append(step)
        if not step.captured and (
            len(self._ended) >= (min(self._every, self._steps) or self._steps)
            or time.monotonic() >= self._next_s
        ):
            self._read()

    def rollout_begins(self) -> None:
        """Begin the stage ``rollout``."""
        self.rollout_ends()
        self._rollout = self.sums.begin(ROLLOUT)

    def generation(self, runs: bool) -> None:
        """Begin or end a ``rollout`` that overlaps steps; no other stage of this task nests inside it."""
        self._beside = (ROLLOUT,)
        self.rollout_ends()
        if runs:
            self._rollout = copy_context().run(self.sums.begin, ROLLOUT)

    def rollout_ends(self) -> None:
        """End the stage ``rollout``; it may have begun in another task or thread."""
        stage, self._rollout = self._rollout, None
        if stage is not None:
            self.sums.end_stage(stage)

    def capture_ended(self) -> None:
        """Read the workers in the background after a capture."""
        self._read()

    def train_ends(self, timeout_s: float) -> None:
        """Read the workers for the last time, and wait until all summaries are made."""
        self.step_ends()
        self._until_s = time.monotonic() + timeout_s
        self._read()
        if (thread := self._thread) is not None:
            thread.join(timeout_s + LEAST_PAUSE_S)
        if self._ranks is not None and not self._ranks.leads:
            self._ranks.send([], last=True)
        self._ranks, self._until_s = None, inf

    def _read(self) -> None:
        """Start a read on the background thread; it ends when all ended steps have summaries."""
        with self._lock:
            self._at_once = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="verl-profiling-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not (self._at_once or self._pending):
                    self._thread = None
                    return
            try:
                self._look()
            except Exception as error:
                self._say_once(id(Watch), self._pending[0].step if self._pending else 0, error)
                self._pending.clear()

    def _look(self) -> None:
        """Call the workers for newly ended steps, and publish the steps with all replies."""
        begin_s = time.thread_time()
        if self._at_once:
            self._at_once = False
            self._take_steps()
        self._workers.ask(self._pending, self._ranks is None and self.recorders.due)
        waited_s = time.monotonic() - self._pending[0].since_s if self._pending else 0.0
        self._workers.wait(min(_SHORTEST_LOOK_S + waited_s / 4, _LONGEST_LOOK_S))
        if self._ranks is not None and self._ranks.leads and self._pending:
            self._ranks.look([step.step for step in self._pending], self._until_s < inf)
        whole = []
        while self._pending and self._is_whole(self._pending[0]):
            whole.append(self._pending.popleft())
        if whole:
            self._publish(whole)
        elif self._pending and not self._workers.are_asked:
            time.sleep(_SHORTEST_LOOK_S)
        self._next_s = time.monotonic() + max(LEAST_PAUSE_S, PAUSE * (time.thread_time() - begin_s))

    def _take_steps(self) -> None:
        expected = self._workers.expected()
        last = self._pending[-1].step if self._pending else None
        while self._ended:
            step = self._ended.popleft()
            if self._ranks is not None and last is not None and step.step < last:
                self._ranks.counts_anew()
            last = step.step
            step.since_s = time.monotonic()
            step.lacks = set(expected) if self._every or step.captured else set()
            self._pending.append(step)

    def _is_whole(self, step: PendingStep) -> bool:
        ranks = self._ranks if self._ranks is not None and self._ranks.leads else None
        if not step.lacks and not (ranks is not None and ranks.lacking(step.step)):
            return True
        now_s = time.monotonic()
        if now_s < min(step.since_s + self._timeout_s, self._until_s):
            return False
        self._workers.give_up([step])
        if ranks is not None:
            ranks.give_up(step.step, now_s - step.since_s)
        return True

    def _publish(self, steps: Sequence[PendingStep]) -> None:
        """Make the summaries of steps, add their exposed times, and pass them to the listeners."""
        times = [(step.begin_ns, step.end_ns) for step in steps]
        own = self.sums.of_steps(self._who, times)
        if self._ranks is not None and self._ranks.collectives:
            own = with_collectives(own, times)
        summaries = [
            StepSummary(
                step=step.step,
                begin_ns=step.begin_ns,
                end_ns=step.end_ns,
                policy_version=step.policy_version,
                loop=[use] if use is not None else [],
                workers=sorted(step.workers.values(), key=lambda use: (use.role, use.rank, use.lane)),
                beside=self._beside,
                captured=step.captured,
            )
            for step, use in zip(steps, own, strict=True)
        ]
        if self._ranks is not None and not self._ranks.leads:
            self._ranks.send(summaries)
        for summary in summaries:
            if self._ranks is not None and self._ranks.leads:
                summary = self._ranks.joined(summary)
            summary = self._explained(summary)
            self.summaries.append(summary)
            for listener in list(self.listeners):
                try:
                    listener(summary)
                except Exception as error:  # an error of a listener does not stop the watch
                    self._say_once(id(listener), summary.step, error)
        if self._ranks is not None and self._ranks.leads:
            self._ranks.ask_collectives(self.recorders.due)

    def _explained(self, summary: StepSummary) -> StepSummary:
        before = self.summaries[-1] if self.summaries else None
        try:
            known = with_lateness(summary)
            known = msgspec.structs.replace(known, exposed=exposed(known, before, self._workers.has_any))
            if self._has_trigger:
                self.recorders.follow(known)
            return known
        except Exception as error:
            self._say_once(id(exposed), summary.step, error)
            return summary

    def _say_once(self, what: int, step: int, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            logger.error("watch: step %d: %s: %s", step, type(error).__name__, error, exc_info=error)
