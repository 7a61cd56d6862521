"""Profiling in the training loop's process: decides on captures, calls the workers, and writes step
folders.

Both callbacks use the hooks of this module, on the caller's thread. A hook yields its blocking
functions, and the asynchronous callback runs them on another thread.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from verl_profiling import clock
from verl_profiling.capture.finishing import AfterHooks
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture.stage_spans import SpanLog, record_pauses
from verl_profiling.controller.captured_workers import CapturedWorkers
from verl_profiling.controller.decision import Decisions
from verl_profiling.controller.loop_state import LoopOrder, LoopStages, OpenCapture, whole_version
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.run import Run, is_pending
from verl_profiling.controller.run_claim import check_folder
from verl_profiling.controller.spmd import in_a_line, knows_place, place_of
from verl_profiling.controller.watch import Watch
from verl_profiling.controller.worker_calls import Waits
from verl_profiling.errors import ProfilingError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, CaptureResult, StepSpan
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Decision
from verl_profiling.units import visible

LAST_READ_S = 5.0  # for the watch's last calls: training may have ended because a worker hangs
EXIT_S = 20.0
"""Upper limit of each wait for workers at process exit, in seconds: supervisors kill after 30 s."""

_PAUSES = 3
"""Number of spans around a step that the capture itself causes: its start, its stop, and the write
inside the stop. Further spans are stages of the loop.
"""

TRAINING_ENDED = "training ended inside it"

logger = logging.getLogger(__name__)


class Controller:
    """The hooks that both callbacks call.

    Attributes:
        live: The open capture, or ``None``.
        stages: The loop's stages, and where they are recorded.
        watch: The watch, which summarizes every step; ``None`` if it is switched off.
        last: The last capture that was not a warm-up.
        run_notes: Sentences from the loop (``add_note``) for the notes of every manifest.
        roster: The workers.
        begun: Whether the loop has begun in this process; children forked after that do not
            capture.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self.config = config
        self.live: OpenCapture | None = None
        self.last: OpenCapture | None = None
        self.run_notes: list[str] = []
        self.roster = Roster(config)
        check_folder(config)
        self._run = Run(config)
        self._hooks = AfterHooks(config.after)
        self._scheduled = config.schedule.action
        watches = config.watch.enable
        self._last_step = None if watches else config.schedule.last_step()
        self.watch = Watch(config.watch, self.roster, config.timeouts.start_s) if watches else None
        self.decisions = Decisions(config, self.roster, self.watch)
        self._order = LoopOrder()
        self.begun = False
        self.stages = LoopStages(self.watch)

    # Each hook records something in every step, and returns the work for the open capture, or None.

    def on_step_begin(self, begun: tuple[int, int | None]) -> Waits[None] | None:
        """Begin a step, and open a capture or continue one that covers several steps.

        Args:
            begun: Number of the step, and version of the weights that generate.
        """
        self.begun = True
        step, policy_version = begun
        if not self._order.runs:
            self._order.begin(step, self.config.schedule, self._last_step)
        if self.last is not None and not self.last.around:
            self._end_after()
            clock.follow()
        if self.watch is not None and self.watch.step is not None:
            self.stages.end_watched_step(self.watch)
        action = self._scheduled(step)
        decision = None
        records = False
        if self.watch is not None or action is not Action.OFF:
            if not self.decisions.complete:
                self.decisions.begin(self._run)
                self.decisions.find_ranks()
                self.stages.watch_only()
            decision = self.decisions.at(step, self.live is not None and self.live.goes_on(step))
            records = Action.RECORD in (action, decision and decision.step_range.action)
        self._order.step_begins(step, records)
        if self.watch is not None:
            self.watch.step_begins(step, whole_version(policy_version)[0])
        if self.live is None and decision is None:
            return None
        return self._begin_step(step, policy_version, decision)

    def on_rollout_begin(self, in_background: bool) -> Waits[None] | None:
        """Begin generation, and start the rollout engines in discrete mode.

        Args:
            in_background: Whether generation overlaps the steps, so that
                :meth:`on_generation_begin` opens the stage.
        """
        self._order.in_rollout = True
        if in_background:
            self.stages.go_to_background()
        if self.live is not None:
            return self._begin_recorded_rollout(self.live, in_background)
        if self.stages.sink is not None and not in_background:
            self.stages.begin_rollout(self.stages.sink)
        return None

    def on_rollout_end(self, metrics: Mapping[str, Any] | None) -> Waits[None] | None:
        """End generation, and stop the rollout engines in discrete mode."""
        if not self._order.in_rollout:
            self._order.rollout_without_begin()
        self._order.in_rollout = False
        if self.stages.rollout is not None:
            self.stages.end_rollout()
        return None if self.live is None else self.live.end_rollout(metrics)

    def on_step_end(self, metrics: Mapping[str, Any] | None) -> Waits[None] | None:
        """End the step, and close the capture unless it covers the next step too."""
        self._order.step_ends()
        if self.watch is None and self.live is None:
            return None
        if self.watch is not None:
            self.watch.takes(metrics)
        self.on_stages_end()
        return None if self.live is None else self._end_step(self.live, metrics)

    def on_exception(self, error: BaseException) -> Waits[None] | None:
        """Close the capture, because the loop raised."""
        self._order.is_left()
        if self.live is None:
            return None
        why = in_a_line(error)
        logger.warning("closing the capture after %s", why)
        return self.close(why)

    def on_generation_begin(self) -> None:
        """Begin a batch in the background of the steps: the first one opens the stage."""
        is_captured = self.live is not None and not self.live.step.end_ns
        self.stages.begin_generation(is_captured)

    def on_generation_end(self) -> None:
        """End a batch in the background of the steps: the last one ends the stage."""
        self.stages.end_generation()

    def on_stages_end(self) -> None:
        """Record the end of the step; :meth:`on_step_end` closes its capture."""
        if self.watch is not None:
            self.stages.end_watched_step(self.watch)
        live = self.live
        if live is None or live.step.end_ns:
            return
        live.end_step()
        if live.in_last_step:
            self.stages.renew_generation()  # it ends in the capture, and goes on for the watch
            self.stages.pass_to(live.around_log)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add numbers to a step of the open capture, or of the last one that was written."""
        for capture in filter(None, (self.live, self.last)):
            for begun in capture.steps:
                if begun.step == step:
                    capture.keep(metrics, begun)
                    self._write_again(capture)
                    return

    def _begin_recorded_rollout(self, live: OpenCapture, in_background: bool) -> Waits[None]:
        self.stages.end_rollout()
        yield from live.workers.begin_rollout(live.step.step)
        if not in_background:
            self.stages.begin_rollout(live.log)

    # The work of the hooks.

    def on_train_begin(self) -> None:
        """Check the settings against the workers."""
        self.begun = True
        self.roster.check_selection(capturing=False)
        self._run.amend(end_ns=None)  # it is set if the callback is entered again
        # Else later workers may still tell whether ranks capture together: the first step does it.
        if knows_place(self.config, self.roster.targets):
            self.decisions.begin(self._run)

    def _begin_step(
        self, step: int, policy_version: int | None, decision: Decision | None
    ) -> Waits[None]:
        live = self.live
        if live is not None and live.goes_on(step):
            live.go_on(step, policy_version)
            yield from self._say_begun(live)
            self._step_begins(live)
            return
        if live is not None:
            logger.warning(
                "step %d begins while step %d is being captured; closing it", step, live.step.step
            )
            yield from self.close(f"step {step} began before this one had ended")
            self._end_after()
        if decision is None:
            return
        self.roster.check_selection(capturing=True)
        around_log = SpanLog(self.stages)
        with around_log.during(CAPTURE_START):
            try:
                live = yield from self._open(decision, step, policy_version, around_log)
            except Exception as error:
                self.decisions.refused(decision.trigger, f"its capture could not begin: {error}")
                self._run.not_captured(step, f"{type(error).__name__}: {error}")
                raise
            if live is None:
                return
            yield from live.workers.start(live.request)
            yield from self._say_begun(live)
        self._step_begins(live)

    def _end_step(self, live: OpenCapture, metrics: Mapping[str, Any] | None) -> Waits[None]:
        live.keep(metrics)
        if live.in_last_step:
            yield from self.close()

    def close(self, why: str = "") -> Waits[None]:
        """Stop all workers and write the step folder.

        Args:
            why: Reason why the step has not ended; empty if the step has ended.

        Raises:
            ProfilingError: Something failed, and the settings are strict.
        """
        live = self.live
        if live is None:
            return
        with live.around_log.during(CAPTURE_STOP):
            results = yield from self._conclude(live, why)
        if live.request.keep:
            self.last = live
            self.stages.pass_to(live.around_log)
        if self.config.strict and live.decision.trigger.kind == "schedule":
            for worker in results:
                if worker.status not in ("ok", "skipped"):
                    raise ProfilingError(
                        f"step {live.request.step}: {worker.name} {worker.status}: {worker.reason}"
                    )

    def on_train_end(self, why: str) -> Waits[None]:
        """Close the open capture, and wait for late replies and for the compression of artifacts.

        After an error in one part, the other parts still run; the first error is raised at the end.
        """
        atexit.unregister(self._exit)
        self._order.end()
        first: Exception | None = None
        for part in (
            self._end_capture(why),
            self._end_watch(),
            self.roster.finish(self._hooks.longest_s),
            self._end_run(),
        ):
            try:
                yield from part
            except Exception as error:
                if first is not None:
                    logger.error("the end of training: %s", in_a_line(error))
                first = first or error
        if first is not None:
            raise first

    def _open(
        self, decision: Decision, step: int, version: int | None, around_log: SpanLog
    ) -> Waits[OpenCapture | None]:
        """Make the step folder, and open the capture;
        return ``None`` if this process is not captured.
        """
        policy_version, notes = whole_version(version)
        keep = decision.step_range.action is Action.RECORD
        selection = decision.selection
        if not self.decisions.find_ranks():
            return None
        ranks = self.decisions.ranks
        if ranks is not None and not (yield from self._run.share_run(ranks, step)):
            return None
        folder, why = yield from self._run.prepare(step, keep, ranks is not None, notes)
        if why:
            self.decisions.refused(decision.trigger, why)
            return None
        place = self._run.place
        world_size = 1 if ranks is None else ranks.world_size
        request = CaptureStart(
            capture_id=f"{place.token}-{folder.name}{'' if keep else '-warm-up'}",
            run_id=place.run_id,
            step=step,
            folder=str(folder),
            policy_version=policy_version,
            keep=keep,
            workers=max(1, self.roster.count(selection) * world_size),
            last=self._last_step is not None and decision.step_range.last >= self._last_step,
            upload=place.upload(folder.name),
            selection=selection,
        )
        begun = StepSpan(
            step=step, begin_ns=clock.now_ns(), end_ns=0, policy_version=policy_version
        )
        live = OpenCapture(
            workers=CapturedWorkers(self.roster, request, ranks, notes),
            decision=decision,
            folder=folder,
            steps=[begun],
            log=SpanLog(self.stages),
            around_log=around_log,
            run_notes=self.run_notes,
        )
        if live.leads:
            self._hooks.begun(request, WorkerIdentity(role="controller"))
        clock.hold()
        self.live = live
        self.stages.pass_to(live.log)
        atexit.unregister(self._exit)
        atexit.register(self._exit)
        return live

    def _say_begun(self, live: OpenCapture) -> Waits[None]:
        """Write the manifest (state ``begun``) with placeholders for the workers' results."""
        live.begin_step()
        if live.leads:
            live.expect()
            self._run.write(live)
            yield self._run.wait_for_files

    def _step_begins(self, live: OpenCapture) -> None:
        live.begin_step()
        if self.watch is not None:
            live.log.take_over(self.watch.sums, live.step.begin_ns)
            self.watch.capture_begins(live.folder.name if live.request.keep else "")
        self.stages.record_generation()

    # The end of a capture.

    def _conclude(self, live: OpenCapture, why: str) -> Waits[list[CaptureResult]]:
        """Stop all workers and write the manifest; return the workers' results."""
        folder = live.folder
        upload = live.request.upload
        try:
            results = yield from live.close(why)
            if live.leads:
                with live.around_log.during("write"):
                    manifest = self._run.conclude(live)
                    yield self._run.wait_for_files
                steps = ", ".join(map(str, manifest.steps))
                where = visible(upload.url) if upload else folder
                logger.info("profiling: step %s captured in %s", steps, where)
                self.decisions.concluded(manifest)
            self._hooks.ended(live.request.capture_id, lambda: not is_pending(folder, upload))
        except Exception as error:
            why = f"the recordings could not be written: {error}"
            self.decisions.refused(live.decision.trigger, why)
            self._closed()
            raise
        except BaseException:
            # Ctrl-C: a second one may interrupt on_train_end, which would close the capture.
            self._write_interrupted(live)
            raise
        self._closed()
        return results

    def _write_interrupted(self, live: OpenCapture) -> None:
        live.is_cut_short("its end was interrupted")
        if live.leads:
            live.expect()
            self._run.write(live)
            self._run.wait_for_files()

    def _closed(self) -> None:
        clock.release()
        self.live = None
        self.stages.watch_only()
        if self.watch is not None:
            self.watch.read()

    def _end_after(self) -> None:
        """Add the loop's stages since the end of a captured step to the manifest of the step."""
        capture = self.last
        if capture is None or capture.around:
            return
        self.stages.watch_only()
        capture.around = capture.around_log.close()
        if len(capture.around) > _PAUSES:
            self._write_again(capture)

    def _write_again(self, capture: OpenCapture) -> None:
        if capture.leads and capture is not self.live:
            self._run.write(capture)
            self._run.wait_for_files()

    # The end of training, or of the process.

    def _end_capture(self, why: str) -> Waits[None]:
        try:
            yield from self.close(why)
            self._end_after()
        finally:
            self.decisions.end(self._order.steps)

    def _end_watch(self) -> Waits[None]:
        """Complete the summaries of the last steps."""
        if self.watch is not None:
            yield partial(self.watch.train_ends, min(LAST_READ_S, self.config.timeouts.start_s))

    def _end_run(self) -> Waits[None]:
        run = self._run
        most_s = self.roster.most_s
        record_pauses(self.stages, None)
        if place_of(self.config, self.roster.targets)[0] == 0:  # else rank 0 has the run's folder
            never_came = self._order.train_ends(self.config.schedule, run.resumes)
            if self._order.steps:
                first, last = self._order.steps
                run.amend(
                    first_step=first,
                    last_step=last,
                    end_ns=clock.now_ns(),
                    never_came=never_came,
                )
        finish_s = min(self.config.timeouts.finish_s, most_s)
        yield partial(run.drain, finish_s)
        if self.watch is not None and self.watch.logs is not None:
            yield partial(self.watch.logs.end, finish_s)
        self._hooks.train_ends()
        yield partial(self._hooks.background.drain, min(self._hooks.longest_s, most_s))
        run.leave()
        self.decisions.leave_ranks()

    def leave_to_parent(self) -> None:
        """Record nothing more, and close nothing at exit, in a forked child."""
        self.stages.pass_to(None)
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        """Close the capture at process exit."""
        error = getattr(sys, "last_value", None)
        how = f" with {in_a_line(error)}" if error is not None else ""
        why = f"the process of the loop ended{how}, without on_step_end or on_exception"
        if self.live is not None:
            logger.warning("closing the capture: %s", why)
        self.roster.most_s = EXIT_S
        try:
            for wait in self.on_train_end(why):
                wait()
        except Exception as error:
            logger.error("profiling could not be closed: %s", in_a_line(error))
