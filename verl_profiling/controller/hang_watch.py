"""Detects a step that hangs: no process progresses, for far longer than its stage usually takes.

One thread of the loop's process checks while a step is open. If the loop's process makes no
progress (a stage that begins or ends, a new token) for too long, the thread asks all processes: by
a call, and by its file in ``hangs/``, because a busy process answers no call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.capture.session import process_session
from verl_profiling.controller.spmd import PROBLEMS, Ranks
from verl_profiling.controller.worker_calls import Call, Postponed, Target, WorkerLostError
from verl_profiling.files.opener import make_folder, read_small, remove_file, whole_file
from verl_profiling.files.run_files import ended_hang, write_json_atomically
from verl_profiling.files.step_summary import Hang, RankUse, StepSummary
from verl_profiling.units import duration
from verl_profiling.watch.hang_kinds import culprit, silent
from verl_profiling.watch.hangs import LOOP_FILE, HangReporter, ProcessState, in_background
from verl_profiling.watch.process_recorder import end_recorder
from verl_profiling.watch.process_sums import NO_LOOKS, StageSums, WatchQuestion, WatchReading

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 2.0  # between two checks; a short hang_s is divided into five
_AGAIN = 0.25  # share of a hang's length after which it is asked again: 25 times in ten hours
_ANSWER_S = 1.0  # for answers, in addition to the interval at which workers check
_USUAL_STEPS = 20  # latest steps: their median is the usual duration of a stage
_MANY_TIMES = 3  # times the usual duration without progress: less is a slow stage
_KEY = "watch/hangs"


@dataclass(eq=False)
class HangWatch:
    """Detects that the open step of a loop hangs, and names the process that the others wait for.

    Args:
        loop: The watch of the loop.
        folder: The folder into which each process writes a file with its open stages.
        log: Writes the summary of a step as a line into the run's log.
        publish: Uploads the log and the files of the hang, if the run is behind a URL.
        ranks: The connection to the other ranks of the loop, if it has several.
        ended: Set when training ends.
        hanging: The step that hangs, until it goes on.
        is_left: Whether training ended in a step that hung; then its log line and files are kept.
        told: What readings of the watch tell processes that were started again: :attr:`reports`,
            between the first poll and the end. Before, a local worker would start a thread of its
            own; after, a worker would start again.
    """

    loop: Any  # controller.watch.Watch, which imports this module
    folder: Path
    log: Callable[[StepSummary], object]
    publish: Callable[[], object] = lambda: None
    ranks: Ranks | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    hanging: StepSummary | None = None
    is_left: bool = False
    told: tuple[str, float] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _calls: dict[Target, list[Call]] = field(default_factory=dict)
    _examined: StepSummary | None = None
    _slow: StepSummary | None = None
    _elsewhere_ns: int = 0
    _asked_ns: int = 0
    _kept: Hang | None = None

    def step_begins(self) -> None:
        """Start the thread that checks for hangs, unless it runs; it ends when no step is open."""
        with self._lock:
            if self._thread is None:
                self._thread = in_background(self._run)

    def end(self) -> None:
        """End the threads, here and in workers;
        the one here logs that a hang of the last step is over.
        """
        self.ended.set()
        self.told = None
        thread = self._thread  # it sets the attribute to None when no step is open
        if thread is not None:
            thread.join(_ANSWER_S)
        end_recorder()
        self._call(self.loop.roster.driven(None), NO_LOOKS)

    @property
    def reports(self) -> tuple[str, float]:
        """The folder of the files, and the pause between two polls (s), as workers get them."""
        return str(self.folder), min(_LONGEST_PAUSE_S, self.loop.options.hang_s / 5)

    def _sums(self) -> set[StageSums]:
        return {self.loop.sums, process_session().sums or self.loop.sums}

    def _run(self) -> None:
        who = self.loop.who
        self._reporter = HangReporter(self.reports, who.lane, who.role, self._sums)
        if self._reporter.recorder is not None:
            self._reporter.recorder.open_step = lambda: self.loop.step
        process_session().reporter = self._reporter  # local workers need no thread of their own
        if not self.ended.is_set():
            self.told = self.reports
        try:
            if self.ranks is not None:
                self.ranks.set(_KEY, msgspec.msgpack.encode(self.reports))
            while True:
                self._call(filter(self._is_new, self.loop.roster.driven(None)), self.reports)
                if self.ended.wait(self.reports[1]):
                    break
                self._reporter.record()
                if (step := self.loop.step) is not None:
                    self._look(step)
                    continue
                self._goes_on()
                with self._lock:
                    if self.loop.step is None:
                        self._thread = None  # until the next step begins
                        return
            self._goes_on()
        except Exception as error:
            logger.error("watch: hangs are not noticed any more: %s", error, exc_info=error)

    def _look(self, step: StepSummary) -> None:
        begin_ns, stage = step.begin_ns, ""
        for opened_ns, name in self._reporter.stages():
            if name not in self.loop.background:
                begin_ns, stage = opened_ns, name
        usual_s = self._usual_s(stage)
        limit_s = self.loop.options.first_hang_s if usual_s is None else _MANY_TIMES * usual_s
        limit_s = max(self.loop.options.hang_s, limit_s)
        quiet_s = self._quiet_s(step)
        if quiet_s < self.loop.options.hang_s or self._examined not in (None, step):
            self._goes_on()
            open_s = (clock.now_ns() - begin_ns) / 1e9
            if open_s > limit_s and self._slow is not step:
                self._slow = step
                logger.info(
                    "watch: step %d is slow but not hung: %s in %s so far",
                    step.step,
                    duration(open_s),
                    stage or "no stage",
                )
        elif quiet_s >= limit_s and (
            self._examined is not step or self._is_asked_again(limit_s, quiet_s)
        ):
            self._examined = step
            self._judge(step, stage, usual_s, limit_s)

    def _is_asked_again(self, limit_s: float, quiet_s: float) -> bool:
        """Return whether to ask all processes again in a hang. Elsewhere, something may have
        progressed, and then hung. The longer the hang lasts, the more seldom they are asked.
        """
        asked_s = (clock.now_ns() - self._asked_ns) / 1e9
        return asked_s >= max(limit_s, _AGAIN * quiet_s)

    def _judge(self, step: StepSummary, stage: str, usual_s: float | None, limit_s: float) -> None:
        """Ask all processes whether something progresses; else the step hangs, and is logged.

        Args:
            step: Summary of the open step.
            stage: The stage that is open in the loop; empty for none.
            usual_s: Usual duration (s) of the stage or else of a step, if it is known.
            limit_s: Time (s) without progress after which the step hangs.
        """
        if self.hanging is step:
            self._keep_stacks(step)  # the answers replace them
        asked_ns, self._asked_ns = self._asked_ns, clock.now_ns()
        everyone = self._ask()
        quiet_s = self._quiet_s(step)
        for state in everyone:
            if state.process is not None:
                quiet_s = min(quiet_s, state.quiet_s)
        # Quiet since a limit before the last asking, or for less: half a limit is in between.
        since_s = (self._asked_ns - asked_ns) / 1e9 + limit_s / 2
        is_over = self.hanging is step and quiet_s < since_s
        if quiet_s < limit_s or is_over:
            self._elsewhere_ns = clock.now_ns() - int(1e9 * quiet_s)
            self._goes_on()
        elif step is self.loop.step and self.hanging is not step:
            lane, reason, waiting = culprit(everyone, stage)
            step.hang = Hang(stage, quiet_s, usual_s, lane, reason, waiting)
            self.hanging = step
            logger.warning("watch: %s; see %s", step.hangs, self.folder)
            self.log(msgspec.structs.replace(step))  # a copy, as the step may end meanwhile
            self.publish()

    def _quiet_s(self, step: StepSummary) -> float:
        """Return for how long nothing has progressed, as far as the loop knows (s)."""
        last_ns = max(step.begin_ns, self._reporter.last_ns(), self._elsewhere_ns)
        return (clock.now_ns() - last_ns) / 1e9

    def _goes_on(self) -> None:
        """Remove the loop's file; if the step hung, log that it goes on."""
        step = self._examined
        self._examined = None
        if step is None or self.is_left:
            return
        if self.hanging is step:
            self._keep_stacks(step)
        with suppress(OSError):  # removed already
            remove_file(self.folder / LOOP_FILE)
        if self.hanging is step:
            self.hanging = None
            seconds = duration((clock.now_ns() - step.begin_ns) / 1e9)
            logger.warning("watch: step %d goes on, %s after its begin", step.step, seconds)
            if step is self.loop.step:
                self.log(msgspec.structs.replace(step, hang=None))
            self.publish()

    def _keep_stacks(self, step: StepSummary) -> None:
        """Copy the files of the loop and of the process that it waited for, for the run's page,
        once for each hang.
        """
        if self._kept is step.hang:
            return
        self._kept = step.hang
        kept = self.folder / ended_hang(step.step)
        lane = step.hang.lane if step.hang else ""
        with suppress(OSError):  # a process that is dead has none
            make_folder(kept)
            for name in (LOOP_FILE, f"{lane}.json"):
                with whole_file(kept / name) as file:
                    file.write(read_small(self.folder / name))

    def _usual_s(self, stage: str) -> float | None:
        """Return the median duration of a stage over the last steps without a hang (s).

        Without the name of a stage, return that of the whole steps; ``None`` if it is unknown.
        """
        steps = [step for step in [*self.loop.summaries] if step.hang is None][-_USUAL_STEPS:]
        times = [step.seconds for step in steps]
        if stage:
            times = []
            for process in [process for step in steps for process in step.loop]:
                runs_ns = [run[3] for run in process.each_run() if run[0] == stage]
                if runs_ns:
                    times.append(sum(runs_ns) / 1e9)
        return median(times) if times else None

    def _call(self, targets: Iterable[Target], reports: tuple[str, float]) -> list[Call]:
        """Tell workers in which folder, and at which interval, to report; return the calls.

        A worker that replies is not stuck in another call.
        """
        question = WatchQuestion(hangs=reports)
        calls = {target: target.call("read_watch", question) for target in targets}
        self._calls |= calls
        return list(chain.from_iterable(calls.values()))

    def _is_new(self, target: Target) -> bool:
        """Return whether a worker of a target has not been reached yet: the target was added since
        the last poll, or a process of it had not joined then.
        """
        calls = self._calls.get(target)
        if calls is None:
            return True
        # A busy worker gets no second call: it would find all of them when it has time.
        is_answered = all(call.future.done() for call in calls)
        return is_answered and any(call.error is not None for call in calls)

    def _ask(self) -> list[ProcessState]:
        """Return the states of this process and of all others, or their problems."""
        path = self.folder / LOOP_FILE
        loop = self._reporter.state(0)
        make_folder(self.folder)
        write_json_atomically(path, loop, durable=False)
        calls = self._call(self.loop.roster.driven(None), self.reports)
        request_ns = path.stat().st_mtime_ns
        self.ended.wait(self.reports[1] + _ANSWER_S)
        others = {
            state.lane: state
            for state in self._states(calls, request_ns)
            if state.process != loop.process
        }
        return [loop, *others.values()]

    def _states(self, calls: list[Call], request_ns: int) -> Iterator[ProcessState]:
        """Yield the state of each other process, or its problem."""
        written = self._written(request_ns)
        domains = {
            state.process.clock_domain for state in written.values() if state.process is not None
        }
        role = self.loop.who.role
        if self.ranks is not None:
            for rank, process in self.ranks.processes.items():
                lane = f"{role}_rank{rank}"
                yield written.get(process) or silent(lane, role, process, domains)
        for call in calls:
            reading = call.reply()
            if isinstance(reading, WatchReading):
                call.worker.identity = reading.identity
            who = call.worker.identity
            answers = call.future.done() or isinstance(call.future, Postponed)
            if "Actor" in type(call.error).__name__:  # Ray's error, not one of the called method
                yield ProcessState(who.lane(), who.role, problem=f"is dead: {call.problem()}")
            elif isinstance(call.error, WorkerLostError):
                yield ProcessState(who.lane(), who.role, problem=str(call.error))
            elif who.lane() in written:
                yield msgspec.structs.replace(written[who.lane()], answers=answers)
            elif not answers:
                yield silent(who.lane(), who.role, who, domains)

    def _written(self, request_ns: int) -> dict[object, ProcessState]:
        """Return what processes wrote about this hang, by lane and by process."""
        written: dict[object, ProcessState] = {}
        for path in self.folder.glob("[!.]*.json"):
            with suppress(OSError, msgspec.MsgspecError):
                state = msgspec.json.decode(read_small(path), type=ProcessState)
                if state.request_ns == request_ns:
                    written[state.lane] = written[state.process] = state
        return written


def report_to_rank_0(ranks: Ranks, who: RankUse, sums: StageSums) -> None:
    """Write files for rank 0's :class:`HangWatch` in the background, until training ends."""

    def report() -> None:
        with suppress(*PROBLEMS):
            while not ranks.ended.wait(_ANSWER_S):
                if (data := ranks.get(_KEY)) is not None:
                    reports = msgspec.msgpack.decode(data, type=tuple[str, float])
                    HangReporter(reports, who.lane, who.role, lambda: {sums}).report(ranks.ended)
                    return

    in_background(report)
