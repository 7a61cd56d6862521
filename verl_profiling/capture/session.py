"""The session of a process, which records one capture at a time.

Profilers are process-wide, so roles that share a process share the session. The first
``start_capture`` opens the capture, and the calls of colocated roles join it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.capture.capture import HANDOVER_S, Capture
from verl_profiling.capture.compiled_stages import replace_in_graphs, stage_in_graph
from verl_profiling.capture.protocol import (
    CaptureStart,
    StartReply,
    StopReply,
    cannot_be_had,
    not_set_up,
    switched_off,
)
from verl_profiling.capture.result_file import NOT_STOPPED, Slot
from verl_profiling.capture.stage_spans import (
    SpanLog,
    Stage,
    StageSink,
    record_pauses,
)
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.files.engine_marks import MarkReader
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.config import ProfilingConfig, WatchOptions
from verl_profiling.settings.roles import TRAJECTORIES, RoleConfig
from verl_profiling.tools import Tool
from verl_profiling.trajectories.spans import total_spans
from verl_profiling.watch.hangs import HangReporter, in_background
from verl_profiling.watch.process_sums import (
    NO_LOOKS,
    STAGES_OF_A_STEP,
    Busy,
    StageSums,
    WatchQuestion,
    WatchReading,
)
from verl_profiling.watch.start_marks import add_engine_marks, add_marks

logger = logging.getLogger(__name__)


class Session:
    """Records at most one capture at a time. All methods may be called from any thread.

    Attributes:
        sink: Receives stages; ``None`` whenever nothing records and the watch is off.
        log: The log into which ``sink`` writes the stages; ``None`` if ``sink`` is.
        sums: The stages of every step, for the watch; ``None`` without the watch.
        identity: The first worker of this process; a trainer goes before an engine.
        reporter: Writes the state of this process to a file when a step hangs, in the folder that
            the loop's process has sent.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all workers and the capture, as in a new process;
        a forked child must not record.
        """
        self.sink: StageSink | None = None
        self.log: SpanLog | None = None
        record_pauses(self, None)
        self.sums: StageSums | None = None
        self.identity: WorkerIdentity | None = None
        self.reporter = HangReporter(NO_LOOKS, "", "", lambda: [])
        total_spans(None)
        self._owners: list[Callable[[], object]] = []
        self._busy: dict[str, Busy] = {}
        self._engine_marks = MarkReader()
        self._capture: Capture | None = None
        self._slot = Slot({})
        self._configs: dict[str, ProfilingConfig] = {}
        self._registered: dict[str, tuple[RoleConfig, bool]] = {}
        self._prepared: set[Tool] = set()
        self._lock = threading.RLock()

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle as a reference, because decorated methods of a worker class refer
        to the session.
        """
        return process_session, ()

    def register(self, config: ProfilingConfig, identity: WorkerIdentity) -> None:
        """Register a worker of this process, and prepare its tools, which may be slow.

        Raises:
            ToolUnavailableError: A tool of the worker cannot work here.
        """
        with self._lock:
            if not self._configs:
                atexit.register(self.leave)
                # A forked process runs no atexit functions.
                if multiprocessing.parent_process() is not None:
                    multiprocessing.util.Finalize(None, self.leave, exitpriority=100)
                self._slot = Slot(config.after)
            self._configs[identity.name] = config
            if self.identity is None or (
                self.identity.replica is not None and identity.replica is None
            ):
                self.identity = identity  # of a trainer, where an engine shares its process
            self.keep_every_step(config.watch)
            if self.sums is not None and TRAJECTORIES in config.tool_names(identity.role):
                total_spans(self.sums.spans)
        self._registered[identity.name] = self._prepared_role(identity, None)

    def owns(self, worker: object) -> None:
        """Attribute this process's memory to the modules of a worker."""
        with suppress(TypeError):  # a class with slots may have no weak references
            self._owners.append(weakref.ref(worker))

    def keep_every_step(self, options: WatchOptions) -> None:
        """Record the stages of all steps from now on, if the watch is switched on."""
        with self._lock:
            if options.enable and self.sums is None:
                self.sums = StageSums(options.steps * STAGES_OF_A_STEP)
                self.sums.memory.owners = self._owners
                self._pass_stages_to(self._capture)

    def read_watch(self, identity: WorkerIdentity, question: WatchQuestion) -> WatchReading | None:
        """Return the stages of this process in some steps, or ``None`` if the watch is off."""
        if self.sums is None:
            return None
        if question.hangs not in (None, self.reporter.reports):
            self.reporter.ended.set()
            self.reporter = reporter = HangReporter(
                question.hangs, identity.lane(), identity.role, lambda: filter(None, [self.sums])
            )
            if question.hangs != NO_LOOKS:
                in_background(lambda: reporter.report(reporter.ended))
        if question.has_start:
            add_marks(self.sums, question.steps[0][1])
        add_engine_marks(self._engine_marks, self.sums)
        return self.sums.read(identity, question)

    def busy(self, name: str) -> Busy | None:
        """Return the stage ``name``, which is open while any of several concurrent tasks is in it.

        ``None`` if the watch is off.
        """
        if self.sums is None:
            return None
        with self._lock:
            return self._busy.setdefault(name, Busy(self.sums, name))

    @property
    def recording(self) -> bool:
        """Whether a capture is open."""
        return self._capture is not None

    def start(self, request: CaptureStart, identity: WorkerIdentity) -> StartReply:
        """Start the capture of ``request``, or join the capture if it runs already.

        Raises:
            CaptureStateError: The worker is not registered.
            Exception: The exception of a tool; nothing is recorded then.
        """
        received_ns = clock.now_ns()
        with self._lock:
            if identity.name not in self._registered:
                raise not_set_up(f"start_capture(step={request.step})", identity, "")
            capture = self._capture
            if capture is not None and capture.request.capture_id != request.capture_id:
                logger.warning(
                    "start_capture(step=%d): step %d was never stopped (%s); closing it",
                    request.step,
                    capture.request.step,
                    capture.identity,
                )
                self._close(capture, NOT_STOPPED)
                capture = None
            role, selected = self._registered[identity.name]
            try:
                if request.selection is not None:
                    role, selected = self._prepared_role(identity, request.selection)
            except (ConfigError, ToolUnavailableError) as error:
                return StartReply(identity, "refused", received_ns, cannot_be_had(request, error))
            if not role.enable:
                reason = switched_off(identity) if request.selection is None else "not requested"
                return StartReply(identity, "skipped", received_ns, reason)
            if not selected:
                self._slot.hooks.begun(request, identity, recorded=False)
                return StartReply(identity, "skipped", received_ns, "not selected")
            if capture is not None:
                self._slot.hooks.begun(request, identity)
                if identity.role not in capture.roles:
                    capture.roles.append(identity.role)
                return StartReply(capture.identity, "joined", received_ns)
            file = self._slot.file.opened(request, role, identity)
            handover_s = min(HANDOVER_S, self._configs[identity.name].timeouts.stop_s / 2)
            background = self._slot.background
            log = SpanLog(self)
            capture = Capture(request, role, identity, background, file.finished, log, handover_s)
            expected = capture.open()
            self._capture = capture
            self._slot.file = file
            clock.hold()
            self._pass_stages_to(capture)
            self._slot.hooks.begun(request, identity)
        return StartReply(
            identity, "recording" if capture.whole else "armed", received_ns, expected=expected
        )

    def stop(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Stop the open capture.

        Args:
            capture_id: The capture to stop; ``None`` for any open capture. For the last ended
                capture, the same result is returned again.
            finish_s: Seconds to wait for background work on artifacts. Without a ``capture_id``,
                training has ended, and the call also waits for the hooks of ``after``.

        Returns:
            The result; ``skipped`` without a capture to stop.
        """
        received_ns = clock.now_ns()
        with self._lock:
            capture = self._capture
            if capture is not None and capture_id in (None, capture.request.capture_id):
                result = self._close(capture)
            elif capture is not None:
                result = self._slot.result(capture_id, capture.identity, capture.request)
            else:
                identity = self.identity or WorkerIdentity(role="unknown")
                result = self._slot.result(capture_id, identity, None)
        return StopReply(self._slot.settle(result, capture_id, finish_s), received_ns)

    def complete_result(self, change: Callable[[CaptureResult], CaptureResult]) -> None:
        """Register a function that changes the open capture's result when it is stopped."""
        if self._capture is not None:
            self._capture.completions.append(change)

    def amend(
        self, capture_id: str, change: Callable[[CaptureResult], CaptureResult]
    ) -> CaptureResult | None:
        """Change the result of the last capture, and write the result file again.

        Args:
            capture_id: The capture.
            change: Takes the result and returns the changed one.

        Returns:
            The result; ``None`` if another capture was the last of this process.
        """
        with self._lock:
            file = self._slot.file
            return file.amend(change) if file.result.capture_id == capture_id else None

    def step(self) -> None:
        """Count a finished mini-batch, for tools with the option ``mini_batches``."""
        capture = self._capture
        if capture is not None:
            capture.step()

    def leave(self) -> None:
        """Stop an open capture and finish pending artifacts, before the process ends."""
        with self._lock:
            capture = self._capture
            if capture is not None:
                logger.warning(
                    "%s ends while step %d is being captured; stopping the capture",
                    capture.identity,
                    capture.request.step,
                )
                self._close(capture)
        finish_s = max((config.timeouts.finish_s for config in self._configs.values()), default=0.0)
        if not self._slot.background.drain(finish_s):
            logger.error(
                "artifacts were still being compressed after %.0f s, and stay uncompressed",
                finish_s,
            )
        self._slot.hooks.background.drain(finish_s)

    def _prepared_role(
        self, identity: WorkerIdentity, selection: CaptureSelection | None
    ) -> tuple[RoleConfig, bool]:
        """Return a worker's settings, and whether the worker takes part;
        prepare the tools if so.
        """
        config = self._configs[identity.name]
        has_trajectories = TRAJECTORIES in config.tool_names(identity.role)
        if selection is not None and selection.stages and has_trajectories:
            # The watch reports spans of concurrent trajectories as a stage, but no tool records
            # them alone.
            is_side_by_side = not self._busy.keys().isdisjoint(selection.stages)
            if is_side_by_side:
                selection = msgspec.structs.replace(selection, mode="e2e", stages=None)
        role = config.for_role(identity.role, selection)
        selected = role.selects(identity.rank, identity.replica, identity.topology, identity.sizes)
        if selected:
            for tool in role.tools:
                if tool not in self._prepared:
                    tool.prepare()
                    self._prepared.add(tool)
        return role, selected

    def _close(self, capture: Capture, failed: str = "") -> CaptureResult:
        try:
            result = capture.close()
        finally:
            self._capture = None
            self._pass_stages_to(None)
            clock.release()
        for complete in capture.completions:
            result = complete(result)
        return self._slot.file.close(result, failed)

    def _pass_stages_to(self, capture: Capture | None) -> None:
        """Send stages to the open capture, if any, and to the watch, if switched on."""
        if capture is not None:
            capture.log.sums = self.sums
            self.log = capture.log
            self.sink = capture if capture.drives else capture.log
        else:
            self.sink = self.log = None if self.sums is None else SpanLog(self, self.sums, None)
        record_pauses(self, self.log)


_session = Session()
_stages: dict[str, Stage] = {}
os.register_at_fork(after_in_child=_session.reset)


def process_session() -> Session:
    """Return the session of this process."""
    return _session


def stage(name: str) -> Stage:
    """Return the stage of that name, as context manager or decorator.

    ``with stage("update_actor"): ...`` or ``@stage("update_actor")`` above a function or a
    coroutine function. Exceptions pass through; stages nest.

    Raises:
        TypeError: The name is not text, e.g. a function under a bare ``@stage``.
        ValueError: The name is empty, or cannot be written as UTF-8.
    """
    try:
        return _stages[name]
    except (KeyError, TypeError):
        made = Stage(_session, name)
        return _stages.setdefault(made.name, made)


def named_stages() -> set[str]:
    """Return the names of all stages that code of this process has made by :func:`stage`."""
    return {*_stages}


replace_in_graphs(stage, stage_in_graph)
