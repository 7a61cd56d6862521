"""Implements the hooks without waiting: each one yields the rounds of calls that it needs.

The two callbacks of :mod:`~verl_profiling.controller.callback` differ only in how they wait for a
round. So a hook is a generator here, which they run.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.afterwards.hooks import FinishHooks
from verl_profiling.aim import Aim
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import process_session
from verl_profiling.capture.stage import SpanLog, StageSink
from verl_profiling.controller.answers import Answers
from verl_profiling.controller.calls import Round, Target, Waiting, Worker
from verl_profiling.controller.decision import Decision, Decisions
from verl_profiling.controller.ending import LoopEnding
from verl_profiling.controller.listening import Listening
from verl_profiling.controller.open_capture import ROLLOUT, OpenCapture, OpenStep
from verl_profiling.controller.order import LoopOrder
from verl_profiling.controller.retention import Retention
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.spmd import Ranks, find_ranks, knows_place, leads, nested
from verl_profiling.controller.step_folder import StepFolders, is_pending
from verl_profiling.controller.watch import Watch
from verl_profiling.controller.watch_outlet import WatchOutlet
from verl_profiling.errors import ProfilingError
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, CUT_SHORT, CaptureResult, Manifest, StageSpan
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, StepRange
from verl_profiling.units import step_list

__all__ = ["Controller"]

HANDSHAKES = 8
_PAUSES = (CAPTURE_START, CAPTURE_STOP, "write")
LAST_READ_S = 5.0  # training may have ended because a worker hangs

logger = logging.getLogger(__name__)


class Controller:
    """Decides, drives the workers, and writes step folders.

    Attributes:
        live: The capture that is open; ``None`` whenever nothing records.
        sink: Receives the controller's stages, while a capture is open and from then until the next step
            begins; else ``None``, unless the watch is on.
        watch: Accounts for every step; ``None`` if it is off.
        last_folder: Step folder of the last capture, once written.
        order: The order of the loop's calls.
        run_notes: What the loop has to say in every manifest.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self.config = config
        self.live: OpenCapture | None = None
        self.last_folder: Path | None = None
        self._folders = StepFolders(config)
        self._owing: set[Worker] = set()
        self._retention = Retention(config.limits.keep_last)
        self._refused: tuple[int, str] | None = None
        self._scheduled = config.schedule.action
        self.decisions = Decisions(config.schedule)
        self._decision: Decision | None = None
        self._watching = config.watch.enable
        self._hooks = FinishHooks(config.after)
        self._ranks: Ranks | None = None
        self._unreached = ""
        self._patience_s = config.timeouts.start_s
        self._identity = WorkerIdentity(role="controller")
        self._roster = Roster(config)
        watch = config.watch
        self.watch = Watch(watch, self._roster, config.timeouts.start_s) if watch.enable else None
        self._listening = Listening(config, self._roster, self._folders, self.decisions, self.watch)
        self._outlet = WatchOutlet(config, self._roster, self._folders, self.watch)
        self.sink: StageSink | None = self._receiver(None)
        self._warm_ups = count(1)
        self._after: SpanLog | None = None
        self.run_notes: list[str] = []
        self._notes: list[str] = []
        self._ending = LoopEnding(self.train_end)
        self.order = LoopOrder()

    def add(self, role: str, workers: Any, loop: AbstractEventLoop | None) -> None:
        """Register workers.

        Raises:
            ConfigError: As :meth:`Roster.add` raises it.
        """
        self._roster.add(role, workers, loop)

    def wants(self, step: int, policy_version: int | None = None) -> bool:
        """Take note that a step begins; return whether it needs any work at all."""
        if self._after is not None:
            self._end_after()
            clock.follow()
        if self.watch is not None:
            self.watch.step_is_over()
        action = self._scheduled(step)
        records = action is Action.RECORD
        if self._watching or action is not Action.OFF:
            records |= self._decide(step)
        self.order.step_begins(step, records)
        if self.watch is not None:
            self.watch.step_begins(step, _version(policy_version)[0])
        return self.live is not None or self._decision is not None

    def _decide(self, step: int) -> bool:
        """Decide on a step, unless the open capture goes on in it; return whether it is recorded."""
        if self._watching and not self._listening.complete:
            self._listening.begin()
            self._find_ranks()
            self._listening.together(self._ranks)
            self._outlet.begin()
            self.sink = self._receiver(None)
        live = self.live
        goes_on = live is not None and live.step.step < step <= live.step_range.last
        self._decision = decision = self.decisions.at(step, goes_on)
        return decision is not None and decision.step_range.action is Action.RECORD

    def check_selection(self, capturing: bool = False) -> None:
        """Warn of roles in the settings that no worker has; once a step is captured, of no workers at all."""
        before, self._notes = self._notes, self._roster.cautions(capturing)
        for text in self._notes:
            if text not in before:
                logger.warning("%s", text)

    def train_begin(self) -> None:
        """Check the settings against the workers."""
        self.check_selection()
        if self._folders.claimed is not None and leads(self.config, self._roster.targets):
            self._folders.claimed.amend(end_ns=None)  # the callback is entered again
        if knows_place(self.config, self._roster.targets):  # else the first step does it
            self._listening.begin()
            self._outlet.begin()

    def step_begin(self, step: int, policy_version: int | None) -> Iterator[Round]:
        """Open a capture, or go on with one that covers several steps."""
        step, live = index(step), self.live
        if live is not None:
            if live.step.step < step <= live.step_range.last:
                version, notes = _version(policy_version)
                live.notes += notes
                live.step.end_ns = live.step.end_ns or clock.now_ns()
                live.steps.append(OpenStep(step, version, clock.now_ns()))
                self._say_begun(live)
                self._count_from_here(live)
                return
            logger.warning("step %d begins while step %d is being captured; closing it", step, live.step.step)
            yield from self.close(complete=False, why=f"step {step} began before this one had ended")
            self._end_after()
        decision, self._decision = self._decision, None
        if decision is None:
            return
        self.check_selection(capturing=True)
        outside = SpanLog()
        with outside.during(CAPTURE_START):
            try:
                live = yield from self._open(decision, step, policy_version, outside)
            except Exception as error:
                self.decisions.refused(decision.trigger, f"its capture could not begin: {error}")
                self._folders.not_captured(step, f"{type(error).__name__}: {error}")
                raise
            if live is None:
                return
            self._set_live(live)
            yield from self._start(live, live.request)
        live.step.begin_ns = clock.now_ns()
        self._say_begun(live)
        self._count_from_here(live)

    def _count_from_here(self, live: OpenCapture) -> None:
        """Let the step begin now: what it took to begin its capture is no part of it."""
        live.step.begin_ns = clock.now_ns()
        if self.watch is not None:
            self.watch.capture_begins(live.folder.name if live.request.keep else "")

    def rollout_begin(self, beside: bool = False) -> Iterator[Round]:
        """Open a window on the rollout engines that are captured by stage.

        Args:
            beside: Generation runs beside the steps; :meth:`generation` says when.
        """
        live = self.live
        if live is None:
            return
        live.end_rollout()
        yield from self._close_rollout_window(live)
        if any(
            self._roster.has_windows(target, live.request.aim)
            for target in self._roster.driven(live.request.aim)
        ):
            live.rollout_request = msgspec.structs.replace(next(live.rollout_requests), step=live.step.step)
            yield from self._start(live, live.rollout_request)
        if not beside:
            live.begin_rollout()

    def generation(self, runs: bool) -> None:
        """Begin or end the stage of a rollout that runs beside the steps."""
        if self.watch is not None:
            self.watch.generation(runs)
        live = self.live
        if live is not None and not live.step.end_ns:
            live.end_rollout()
            if runs:
                live.begin_rollout(beside=True)

    def rollout_end(self, metrics: Mapping[str, Any] | None) -> Iterator[Round]:
        """Close that window."""
        live = self.live
        if live is None:
            return
        live.end_rollout()
        live.keep(metrics)
        yield from self._close_rollout_window(live)

    def step_over(self) -> None:
        """Note that the step ends here, though its capture is closed later."""
        if self.watch is not None:
            self.watch.step_ends()
        live = self.live
        if live is None or live.step.end_ns:
            return
        live.step.end_ns = clock.now_ns()
        if live.step.step >= live.step_range.last:
            live.end_rollout()
            self.sink = self._receiver(live.outside)

    def step_end(self, metrics: Mapping[str, Any] | None) -> Iterator[Round]:
        """Close the capture, unless it goes on in the next step."""
        live = self.live
        if live is None:
            return
        live.keep(metrics)
        live.step.end_ns = live.step.end_ns or clock.now_ns()
        if live.step.step >= live.step_range.last:
            yield from self.close(complete=True)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add numbers to a step of the open capture, or of the last one that was written.

        Raises:
            OSError: The step folder cannot be written.
        """
        live = self.live
        if live is not None and any(one.step == step for one in live.steps):
            live.keep(metrics, step)
        elif self._folders.wrote_last(step):
            self._folders.add_metrics(step, metrics)
            self._folders.flush()

    def abandon(self, why: str) -> Iterator[Round]:
        """Close the capture after a hook failed, at all events so that no worker goes on recording."""
        try:
            yield from self.close(complete=False, why=why)
        except Exception as error:
            live = self.live
            if live is None:
                return
            logger.error("%s; closing the capture failed, too: %s: %s", why, type(error).__name__, error)
            self._set_live(None)
            for request in (live.request, live.rollout_request):
                if request is not None:
                    self._roster.send(self._roster.targets, "stop_capture", request.capture_id)

    def close(self, complete: bool, why: str = "") -> Iterator[Round]:
        """Stop all workers and write the step folder.

        Args:
            complete: The step has ended.
            why: Why not.

        Raises:
            ProfilingError: Something failed, and the settings are strict.
            OSError: The step folder cannot be written.
        """
        live = self.live
        if live is None:
            return
        live.notes += [f"{CUT_SHORT}: {why}"] if why else []
        end_ns = live.step.end_ns or clock.now_ns()
        with live.outside.during(CAPTURE_STOP):
            results = yield from self._conclude(live, end_ns, complete, why)
        if live.request.keep:
            self._after, self.sink = live.outside, self._receiver(live.outside)
        failed = [worker for worker in results if worker.status not in ("ok", "skipped")]
        if failed and self.config.strict and live.trigger.kind == "schedule":
            raise ProfilingError(
                f"step {live.request.step}: {failed[0].name} {failed[0].status}: {failed[0].reason}"
            )

    def _conclude(
        self, live: OpenCapture, end_ns: int, complete: bool, why: str
    ) -> Generator[Round, None, list[CaptureResult]]:
        """Stop all workers and write the manifest; return what they recorded."""
        stages = live.spans.close()
        window, live.rollout_request = live.rollout_request, None
        results: list[CaptureResult] = []
        try:
            yield from self._stop(live, *([window] if window is not None else []), live.request)
            self._owing |= live.answers.owing
            results = live.answers.results()
            manifest = live.manifest(self._identity, end_ns, [*self.run_notes, *self._notes])
            if self._ranks is not None:
                stages, results = self._joined(self._ranks, live, stages, why)
            manifest = msgspec.structs.replace(manifest, complete=complete, stages=stages, workers=results)
            if live.request.keep and leads(self.config, self._roster.targets):
                self._write(live, manifest)
                self.decisions.concluded(manifest)
            if live.request.keep:
                self.last_folder = live.folder
            folder, upload = live.folder, live.request.upload
            self._hooks.ended(live.request.capture_id, lambda: not is_pending(folder, upload))
        except Exception as error:
            self.decisions.refused(live.trigger, f"what was recorded could not be written: {error}")
            raise
        finally:  # until here, SIGTERM unwinds the process
            self._set_live(None)
            if self.watch is not None:
                self.watch.capture_ended()
        return results

    def _joined(
        self, ranks: Ranks, live: OpenCapture, stages: list[StageSpan], why: str
    ) -> tuple[list[StageSpan], list[CaptureResult]]:
        """Enter into this process's result what its callback knows of the step, which is this rank's own.

        Returns:
            The loop's stages and the workers' results, for rank 0 with what stands for the other ranks.
        """
        own, results, joined = ProcessId.current(), live.answers.results(), []
        noted = [] if ranks.leads else [*self._notes, *live.notes, *live.answers.notes]
        for worker in results:
            stages = nested(stages, worker.stages) if worker.process == own else stages
        for worker in results:
            if worker.process == own:
                amended = process_session().amend(
                    worker.capture_id,
                    lambda result: msgspec.structs.replace(
                        result,
                        stages=nested(result.stages, stages),
                        notes=[*result.notes, *(f"rank {ranks.rank}: {note}" for note in noted)],
                        cut_short=why,
                        clock=ranks.clock,
                    ),
                )
                worker = amended or worker
            joined.append(worker)
        if ranks.leads:
            joined += self._expected(ranks, live)
        return stages, joined

    def _expected(self, ranks: Ranks, live: OpenCapture) -> list[CaptureResult]:
        """Return what stands for the other ranks."""
        aim = live.request.aim
        [target, *_] = self._roster.driven(aim) or self._roster.targets
        return ranks.expected(live.answers.model(live.request, target), aim)

    def _end_after(self) -> None:
        """End the record of the loop's stages after a captured step."""
        after, self._after, self.sink = self._after, None, self._receiver(None)
        if after is None:
            return
        spans, notes = after.close(), after.notes()
        if any(span.name not in _PAUSES for span in spans):
            self._folders.add_stages_after(spans, notes)
        try:
            self._folders.flush()
        except OSError as error:
            logger.warning("the last step folder does not say what followed the step: %s", error)

    def train_end(self, why: str = "training ended inside it") -> Iterator[Round]:
        """Close what is open; wait for overdue stops, then for artifacts that are being compressed.

        Each part is done whatever became of the others; what the first of them raised is raised in the end.
        """
        self._ending.ended()
        self.order.is_left()
        failed: list[Exception] = []
        parts = (self._end_capture(why), self._end_watch(), self._end_workers(), self._end_run())
        for part in parts:
            try:
                yield from part
            except Exception as error:
                if failed:
                    logger.error("the end of training: %s: %s", type(error).__name__, error)
                failed.append(error)
        if failed:
            raise failed[0]

    def _end_capture(self, why: str) -> Iterator[Round]:
        try:
            yield from self.close(complete=False, why=why)
            self._end_after()
        finally:
            self.decisions.train_ends()
            self._listening.end()

    def _end_workers(self) -> Iterator[Round]:
        """Let processes finish what they are compressing: Ray ends them with the loop."""
        timeouts = self.config.timeouts
        owing = {id(target) for target, _ in self._owing}
        targets = [
            target
            for target in self._roster.targets
            if id(target) in owing or self._roster.runs_hooks(target)
        ]
        calls = self._roster.send(targets, "stop_capture", None, timeouts.finish_s)
        for call in calls:
            call.awaited = True
        yield (round_ := Round(calls, timeouts.finish_s + timeouts.start_s + self._hooks.longest_s))
        self._roster.remember_unanswered(round_)
        self._owing.clear()

    def _end_run(self) -> Iterator[Round]:
        finish_s = self.config.timeouts.finish_s
        self._folders.flush()
        if leads(self.config, self._roster.targets):
            self._put_end_on_record()
        yield Waiting(self._folders.drain, finish_s)
        yield Waiting(lambda _: self._retention.end(), finish_s)
        self._hooks.train_ends()
        yield Waiting(self._hooks.drain, self._hooks.longest_s)
        self._folders.leave()
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()

    def _open(
        self, decision: Decision, step: int, policy_version: int | None, outside: SpanLog
    ) -> Generator[Round, None, OpenCapture | None]:
        policy_version, notes = _version(policy_version)
        step_range, aim = decision.step_range, decision.aim
        keep = step_range.action is Action.RECORD
        self._find_ranks()
        if self._unreached or not (yield from self._knows_run(step)):
            return None
        run = self._folders.run
        if self._ranks is not None and self._ranks.leads:
            self._ranks.publish(run)
        if keep and (why := self._refuses(step)):
            self.decisions.refused(decision.trigger, why)
            return None
        name = self._folders.name(step, keep)
        folder = self._folders.make(name, self._ranks is not None) if keep else run.path / name
        request = CaptureRequest(
            capture_id=f"{run.token}-{name if keep else f'warm-up-{next(self._warm_ups)}'}",
            run_id=run.run_id,
            step=step,
            folder=str(folder),
            policy_version=policy_version,
            keep=keep,
            workers=self._workers(aim),
            last=self._is_last(step_range),
            upload=run.upload_of(folder),
            aim=aim,
        )
        windows = (
            msgspec.structs.replace(
                request, capture_id=f"{request.capture_id}/{number}", stage=ROLLOUT, occurrence=number
            )
            for number in count(1)
        )
        if keep and leads(self.config, self._roster.targets):
            self._hooks.begun(request, self._identity)
        return OpenCapture(
            step_range,
            decision.trigger,
            request,
            folder,
            Answers(self.config, self._roster.known, request.aim, self._ranks is None),
            [OpenStep(step, request.policy_version, clock.now_ns())],
            windows,
            outside,
            notes=notes,
        )

    def _find_ranks(self) -> None:
        """Find the other ranks of the loop, if it has any; where they cannot be reached, say so once."""
        said: list[str] = []
        self._ranks = self._ranks or find_ranks(self.config, self._roster.targets, said.append)
        if said and not self._unreached:
            logger.error("%s", said[0])
        self._unreached = said[0] if said else ""

    def _knows_run(self, step: int) -> Generator[Round, None, bool]:
        """Return whether it is known where the run records; a rank waits until rank 0 has said so."""
        ranks = self._ranks
        if ranks is None or ranks.leads or self._folders.claimed is not None:
            return True
        yield Waiting(ranks.wait_for_run, self._patience_s)
        self._folders.claimed = ranks.run()
        if self._folders.claimed is None:
            logger.error(
                "step %d: rank %d is not captured: rank 0 has not begun a captured step within %g s; has it "
                "a callback with workers and the same settings? Where it has none, set spmd: false",
                *(step, ranks.rank, self._patience_s),
            )
            self._patience_s = 0.0
        return self._folders.claimed is not None

    def _start(self, live: OpenCapture, request: CaptureRequest) -> Iterator[Round]:
        """Start what a request is for: the engines of a rollout window, or all others that are driven."""
        answers = live.answers
        targets = self._concerned(request, self._roster.driven(request.aim))
        round_ = Round(self._roster.send(targets, "start_capture", request), self.config.timeouts.start_s)
        answers.take_calls(round_)
        yield round_
        self._roster.remember_unanswered(round_)
        answers.take_starts(round_, request)
        remote = answers.remote_clocks(targets, HANDSHAKES)
        yield from self._shake_hands(live, "start_capture", request, remote)

    def _stop(self, live: OpenCapture, *requests: CaptureRequest) -> Iterator[Round]:
        """Stop what was started with these requests, all at the same time."""
        answers, stop_s = live.answers, self.config.timeouts.stop_s
        remote = answers.remote_clocks(answers.targets, HANDSHAKES)
        rounds = []
        for request in requests:
            targets = self._concerned(request, answers.targets)
            rounds.append(Round(self._roster.send(targets, "stop_capture", request.capture_id), stop_s))
        yield Round([call for round_ in rounds for call in round_.calls], stop_s)
        for round_, request in zip(rounds, requests, strict=True):
            self._roster.remember_unanswered(round_)
            answers.take_stops(round_, request)
            if self.watch is not None:
                self.watch.take(round_.calls)
        yield from self._shake_hands(live, "stop_capture", requests[-1].capture_id, remote)

    def _concerned(self, request: CaptureRequest, targets: Iterable[Target]) -> list[Target]:
        windowed = request.stage is not None
        return [target for target in targets if self._roster.has_windows(target, request.aim) is windowed]

    def _shake_hands(
        self, live: OpenCapture, method: str, argument: CaptureRequest | str, times: Counter[Target]
    ) -> Iterator[Round]:
        """Repeat a call, which changes nothing, to measure clocks that are not the controller's.

        Args:
            live: The capture.
            method: The method.
            argument: Its argument.
            times: How often each target is called; a group can only be called as a whole.
        """
        while times:
            targets, times = list(times), times - Counter(dict.fromkeys(times, 1))
            round_ = Round(self._roster.send(targets, method, argument), self.config.timeouts.start_s)
            yield round_
            live.answers.take_handshakes(round_, closing=method == "stop_capture")

    def _workers(self, aim: Aim | None) -> int:
        """Return how many workers are asked, those of other ranks included."""
        own = sum(target.size for target in self._roster.driven(aim))
        return max(1, own * (self._ranks.world_size if self._ranks is not None else 1))

    def _refuses(self, step: int) -> str:
        """Return why the limits leave no room for a capture; said when it begins to be so."""
        why = self.config.limits.no_room(self._folders.run.path)
        before, self._refused = self._refused, None
        if why:
            self._refused = (step if before is None else before[0], why)
            if before is None:
                logger.warning("step %d is not captured, nor are others until there is room: %s", step, why)
                self._folders.not_captured(step, f"{why}; nor were others until there was room")
        elif before is not None:
            self._notes.append(f"from step {before[0]} on nothing was captured until now: {before[1]}")
        return why

    def _write(self, live: OpenCapture, manifest: Manifest) -> None:
        """Write a manifest, and remove the captures that it takes the place of."""
        leaving, notes = self._retention.take(self._folders.run.run_id, live.folder)
        with live.outside.during("write"):
            notes = [*manifest.notes, *notes]
            self._folders.write(
                live.folder, msgspec.structs.replace(manifest, notes=notes, outside=live.outside.so_far())
            )
        upload, steps = live.request.upload, step_list([step.step for step in live.steps])
        logger.info("profiling: %s captured in %s", steps, upload.url if upload else live.folder)
        self._retention.remove(leaving)

    def _set_live(self, live: OpenCapture | None) -> None:
        if (live is None) != (self.live is None):
            (clock.hold if live is not None else clock.release)()
        self.live, self.sink = live, self._receiver(live.spans if live is not None else None)
        self._ending.records(live is not None)

    def _receiver(self, log: SpanLog | None) -> StageSink | None:
        """Return what receives the loop's stages while a log does, or none."""
        return log if self.watch is None else self.watch.receiver(log)

    def _say_begun(self, live: OpenCapture) -> None:
        """Write what is expected, so that the folder explains itself whatever becomes of this process."""
        if not (live.request.keep and leads(self.config, self._roster.targets)):
            return
        manifest = live.manifest(self._identity, live.steps[0].begin_ns, [*self.run_notes, *self._notes])
        workers = live.answers.expected(live.request, self._roster.driven(live.request.aim))
        if self._ranks is not None:
            workers += self._expected(self._ranks, live)
        self._folders.begin(live.folder, msgspec.structs.replace(manifest, workers=workers))

    def _close_rollout_window(self, live: OpenCapture) -> Iterator[Round]:
        request, live.rollout_request = live.rollout_request, None
        if request is not None:
            yield from self._stop(live, request)

    def _end_watch(self) -> Iterator[Round]:
        """Complete the accounts of the last steps."""
        if self.watch is not None:
            wait_s = min(LAST_READ_S, self.config.timeouts.start_s)
            yield Round(self.watch.open_calls(), wait_s)
            yield Round(self.watch.last_calls(), wait_s)
            if (ranks := self.watch.last_step_is_over()) is not None:
                yield Waiting(ranks.wait, wait_s)
            self.watch.train_ends()
            yield Waiting(self._outlet.end, self.config.timeouts.finish_s)

    def _put_end_on_record(self) -> None:
        """Say which steps of the schedule never came, here and in the run's file, if it has one."""
        run = self._folders.claimed
        never_came = self.order.train_ends(self.config.schedule, run is not None and run.resumes)
        if run is not None and (steps := self.order.steps) is not None:
            run.amend(first_step=steps[0], last_step=steps[1], end_ns=clock.now_ns(), never_came=never_came)

    def _is_last(self, step_range: StepRange) -> bool:
        last_step = None if self._watching else self.config.schedule.last_step()
        return last_step is not None and step_range.last >= last_step


def _version(policy_version: object) -> tuple[int | None, list[str]]:
    """Return a policy version that is a whole number, and a note on one that is not."""
    try:
        return None if policy_version is None else index(policy_version), []  # type: ignore[arg-type]
    except TypeError:
        kind = type(policy_version).__name__
        return None, [f"policy_version is a {kind}, not a whole number: left out"]
