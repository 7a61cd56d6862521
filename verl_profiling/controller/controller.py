"""Implements the hooks without waiting: each one yields the rounds of calls that it needs.

The two callbacks of :mod:`~verl_profiling.controller.callback` differ only in how they wait for a
round. So a hook is a generator here, which they run.
"""

from __future__ import annotations

import logging
import uuid
from asyncio import AbstractEventLoop
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.afterwards.hooks import FinishHooks
from verl_profiling.capture.messages import Aim, CaptureRequest
from verl_profiling.capture.stage import SpanLog, StageSink
from verl_profiling.controller.calls import Round, Waiting
from verl_profiling.controller.decision import Decision, Decisions
from verl_profiling.controller.ending import LoopEnding
from verl_profiling.controller.late_answers import DYING_S, OverdueStops
from verl_profiling.controller.listening import Listening
from verl_profiling.controller.loop_metrics import finite_numbers
from verl_profiling.controller.open_capture import ROLLOUT, OpenCapture, OpenStep
from verl_profiling.controller.order import LoopOrder
from verl_profiling.controller.outside import Outside
from verl_profiling.controller.participants import Participants
from verl_profiling.controller.peers import Alone
from verl_profiling.controller.retention import Retention
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.rounds import Rounds
from verl_profiling.controller.spmd import find_peers, knows_peers, leads
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.controller.watch import Watch
from verl_profiling.controller.watch_outlet import WatchOutlet
from verl_profiling.errors import ProfilingError
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, CUT_SHORT, Manifest
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, StepRange

__all__ = ["Controller"]

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
        self._token = uuid.uuid4().hex[:12]
        self._folders = StepFolders(config)
        self._late = OverdueStops(self._folders)
        self._retention = Retention(config.limits)
        self._refused: tuple[int, str] | None = None
        self._scheduled = config.schedule.action
        self.decisions = Decisions(config.schedule)
        self._decision: Decision | None = None
        self._watching = config.watch.enable
        self._hooks = FinishHooks(config.after)
        self._peers: Alone | None = None
        self._identity = WorkerIdentity(role="controller")
        self._roster = Roster(config)
        watch = config.watch
        self.watch = Watch(watch, self._roster, config.timeouts.start_s) if watch.enable else None
        self._listening = Listening(config, self._roster, self._folders, self.decisions, self.watch)
        self._outlet = WatchOutlet(config, self._roster, self._folders, self.watch)
        self.sink: StageSink | None = self._receiver(None)
        self._rounds = Rounds(self._roster, config.timeouts, self.watch)
        self._captures = count(1)
        self._left: Outside | None = None
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
        if self.watch is not None:
            self.watch.step_is_over()
        action = self._scheduled(step)
        records = action is Action.RECORD
        if self._watching or action is not Action.OFF:
            records |= self._decide(step)
        self.order.step_begins(step, records)
        if self._left is not None:
            self._follow_no_more()
        if self.watch is not None:
            self.watch.step_begins(step, _version(policy_version)[0])
        return self.live is not None or self._decision is not None

    def _decide(self, step: int) -> bool:
        """Decide on a step, unless the open capture goes on in it; return whether it is recorded."""
        if self._watching and not self._listening.complete:
            self._listening.begin()
            self._peers = self._listening.together(self._peers)
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
        """Check the settings against the workers; a run that goes on has this start on record from now on.

        Raises:
            OSError: The run's folder cannot be written.
        """
        self.check_selection()
        if leads(self.config, self._roster.targets):
            self._folders.train_begins()
        if knows_peers(self.config, self._roster.targets):  # else the first step does it
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
            self._follow_no_more()
        decision, self._decision = self._decision, None
        if decision is None:
            return
        self.check_selection(capturing=True)
        outside = Outside()
        with outside.spans.during(CAPTURE_START):
            try:
                live = yield from self._open(decision, step, policy_version, outside)
            except Exception as error:
                self.decisions.refused(decision.trigger, f"its capture could not begin: {error}")
                raise
            if live is None:
                return
            self._set_live(live)
            self._say_begun(live)
            yield from self._rounds.start(live, live.request)
            if self._peers is not None:
                self._peers.begun(live.participants.identities())
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
            yield from self._rounds.start(live, live.rollout_request)
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
            self.sink = self._receiver(live.outside.spans)

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
            self._folders.add_metrics(step, *finite_numbers(metrics))

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
        with live.outside.spans.during(CAPTURE_STOP):
            manifest = yield from self._conclude(live, end_ns, complete)
        if live.outside.folder is not None:
            self._left, self.sink = live.outside, self._receiver(live.outside.spans)
        failed = [worker for worker in manifest.workers if worker.status not in ("ok", "skipped")]
        if failed and self.config.strict and live.trigger.kind == "schedule":
            raise ProfilingError(
                f"step {live.request.step}: {failed[0].name} {failed[0].status}: {failed[0].reason}"
            )

    def _conclude(self, live: OpenCapture, end_ns: int, complete: bool) -> Generator[Round, None, Manifest]:
        """Stop all workers and write what they recorded; return the manifest."""
        stages = live.spans.close()
        window, live.rollout_request = live.rollout_request, None
        yield from self._rounds.stop(live, *([window] if window is not None else []), live.request)
        self._set_live(None)
        if self.watch is not None:
            self.watch.capture_ended()
        participants = live.participants
        manifest = live.manifest(self._identity, end_ns, [*self.run_notes, *self._notes])
        manifest = msgspec.structs.replace(
            manifest, complete=complete, stages=stages, workers=participants.results()
        )
        try:
            if live.request.keep and self._peers is not None:
                whole = yield from self._peers.conclude(manifest, live.folder, participants.finished)
                if whole is not None:
                    manifest = self._written(live, whole)
                    self.decisions.concluded(manifest)
                self.last_folder = live.folder
            self._hooks.ended(live.request.capture_id, lambda: self._folders.is_written(live.folder))
        except Exception as error:
            self.decisions.refused(live.trigger, f"what was recorded could not be written: {error}")
            raise
        finally:  # a manifest that cannot be written costs no news of earlier steps
            self._take_late_answers()
            for finished in participants.finished:
                self._folders.note(finished)
        return manifest

    def _follow_no_more(self) -> None:
        """End the record of what the loop does after a captured step."""
        left, self._left, self.sink = self._left, None, self._receiver(None)
        if left is not None:
            left.enter(self._folders)

    def train_end(self, why: str = "training ended inside it") -> Iterator[Round]:
        """Close what is open; wait for overdue stops, then for artifacts that are being compressed.

        Each part is done whatever became of the others; what the first of them raised is raised in the end.
        """
        self._ending.ended()
        failed: list[Exception] = []
        parts = (self._end_capture(why), self._end_stops(), self._end_watch(), self._end_workers())
        for part in (*parts, self._end_run()):
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
            self._follow_no_more()
        finally:
            self.decisions.train_ends()
            self._listening.end()

    def _end_stops(self) -> Iterator[Round]:
        finish_s = self.config.timeouts.finish_s
        if calls := self._late.calls:
            yield Round(calls, finish_s)
        if self._late.dying:
            yield Waiting(self._late.wait_for_the_dying, min(DYING_S, finish_s))
        self._take_late_answers()

    def _end_workers(self) -> Iterator[Round]:
        finish_s = self.config.timeouts.finish_s
        pending = self._folders.pending_workers()
        owners = {
            id(target) for (target, _), identity in self._roster.known.items() if identity.name in pending
        }
        peers = self._peers or Alone()
        targets = [
            target
            for target in self._roster.targets
            if id(target) in owners or not peers.writes or self._roster.runs_hooks(target)
        ]
        calls = self._roster.send(targets, "stop_capture", None, finish_s)
        yield (round_ := Round(calls, finish_s + self.config.timeouts.start_s + self._hooks.longest_s))
        self._roster.remember_unanswered(round_)
        finished = [item for call in calls for item in getattr(call.reply(), "finished", ())]
        for item in finished:
            self._folders.note(item)
        yield from peers.end(finished)

    def _end_run(self) -> Iterator[Round]:
        finish_s = self.config.timeouts.finish_s
        self._folders.flush()
        if leads(self.config, self._roster.targets):
            self._put_end_on_record()
        yield Waiting(self._folders.drain, finish_s)
        self._retention.wait(finish_s)
        self._hooks.train_ends()
        yield Waiting(self._hooks.drain, self._hooks.longest_s)
        self._folders.leave()

    def _open(
        self, decision: Decision, step: int, policy_version: int | None, outside: Outside
    ) -> Generator[Round, None, OpenCapture | None]:
        policy_version, notes = _version(policy_version)
        step_range, aim = decision.step_range, decision.aim
        keep = step_range.action is Action.RECORD

        def make_request() -> CaptureRequest | None:
            if keep and (why := self._refuses(step)):
                self.decisions.refused(decision.trigger, why)
                return None
            folder = self._folders.make(step) if keep else self._folders.path(step)
            if keep:
                self.decisions.begun(decision.trigger, folder.name)
            return CaptureRequest(
                capture_id=f"{self._token}-{next(self._captures)}",
                run_id=self._folders.run.run_id,
                step=step,
                folder=str(folder),
                policy_version=policy_version,
                keep=keep,
                workers=self._workers(aim),
                last=self._is_last(step_range),
                upload=remote.upload_of(folder) if (remote := self._folders.run.remote) else None,
                loop=ProcessId.current(),
                aim=aim,
            )

        self._peers = self._peers or find_peers(self.config, self._roster.targets, self._folders)
        request = yield from self._peers.agree(step, make_request)
        if request is None:
            return None
        folder = Path(request.folder)
        windows = (
            msgspec.structs.replace(
                request, capture_id=f"{request.capture_id}/{number}", stage=ROLLOUT, occurrence=number
            )
            for number in count(1)
        )
        alone = self._peers.processes == 1 and self._peers.writes
        participants = Participants(self.config, self._roster.known, request.aim, alone)
        if keep and self._peers.writes:
            self._hooks.begun(request, self._identity)
            participants.notes += self._folders.notes_on(folder, step)
        return OpenCapture(
            step_range,
            decision.trigger,
            request,
            folder,
            participants,
            [OpenStep(step, request.policy_version, clock.now_ns())],
            windows,
            outside,
            notes=notes,
        )

    def _workers(self, aim: Aim | None) -> int:
        """Return how many workers are asked, those of other ranks included."""
        own = sum(target.size for target in self._roster.driven(aim))
        return max(1, own * (self._peers.processes if self._peers is not None else 1))

    def _refuses(self, step: int) -> str:
        """Return why the limits leave no room for a capture; said when it begins to be so."""
        why = self._retention.refusal(self._folders.run, self._unfinished())
        before, self._refused = self._refused, None
        if why:
            self._refused = (step if before is None else before[0], why)
            if before is None:
                logger.warning("step %d is not captured, nor are others until there is room: %s", step, why)
        elif before is not None:
            self._notes.append(f"from step {before[0]} on nothing was captured until now: {before[1]}")
        return why

    def _written(self, live: OpenCapture, manifest: Manifest) -> Manifest:
        """Write a manifest, and remove the captures that it takes the place of; return it."""
        leaving, notes = self._retention.take(
            self._folders.run, live.folder, manifest, self._unfinished() | {live.folder}
        )
        with live.outside.spans.during("write"):
            manifest = msgspec.structs.replace(
                manifest, notes=[*manifest.notes, *notes], outside=live.outside.spans.so_far()
            )
            written = self._folders.write(live.folder, manifest)
        live.outside.folder = live.folder
        self._late.expect(live.overdue, written)
        self._retention.remove(leaving)
        return manifest

    def _unfinished(self) -> set[Path]:
        others = self._peers.unfinished if self._peers is not None else set()
        return self._folders.unfinished | self._late.folders | others

    def _set_live(self, live: OpenCapture | None) -> None:
        self.live, self.sink = live, self._receiver(live.spans if live is not None else None)
        self._ending.records(live is not None)

    def _receiver(self, log: SpanLog | None) -> StageSink | None:
        """Return what receives the loop's stages while a log does, or none."""
        return log if self.watch is None else self.watch.receiver(log)

    def _say_begun(self, live: OpenCapture) -> None:
        """Write what is expected, so that the folder explains itself whatever becomes of this process."""
        if live.request.keep and self._peers is not None and self._peers.writes:
            manifest = live.manifest(self._identity, live.steps[0].begin_ns, [*self.run_notes, *self._notes])
            workers = self._peers.expected(
                live.participants.expected(live.request, self._roster.driven(live.request.aim))
            )
            self._folders.begin(live.folder, msgspec.structs.replace(manifest, workers=workers))

    def _close_rollout_window(self, live: OpenCapture) -> Iterator[Round]:
        request, live.rollout_request = live.rollout_request, None
        if request is not None:
            yield from self._rounds.stop(live, request)

    def _take_late_answers(self) -> None:
        """Bring manifests up to date with answers that nobody waited for."""
        self._late.take()
        for call in self._roster.take_answered():
            for finished in getattr(call.reply(), "finished", ()):
                self._folders.note(finished)

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
        """Say which steps of the schedule never came, here and in the run's files, if it has any."""
        record = self._folders.record
        came_before = record.came if record is not None else lambda step: False
        never_came = self.order.train_ends(self.config.schedule, came_before)
        if record is not None and (steps := self.order.steps) is not None:
            record.train_ends(*steps, never_came)

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
