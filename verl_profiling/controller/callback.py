"""The trainer callbacks: the hooks a training loop calls.

::

    with profiling:                         # on_train_begin
        for step in ...:
            on_step_begin(step)
            on_rollout_begin ... generation ... on_rollout_end(metrics)
            with stage("update_actor"): ...
            on_step_end(metrics)
                                            # on_exception, if the loop raised; on_train_end

Without a capture, a hook costs about a microsecond and calls no worker. Only the watch, which
times the stages of every step, then calls workers, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import closing
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakSet

from verl_profiling.capture.compiled_stages import replace_in_graphs, stage_in_graph
from verl_profiling.capture.stage_spans import Stage, StageSink
from verl_profiling.controller.controller import TRAINING_ENDED, Controller
from verl_profiling.controller.spmd import in_a_line
from verl_profiling.controller.watch import Watch
from verl_profiling.controller.worker_calls import Waits
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch.process_recorder import note_failure

logger = logging.getLogger(__name__)

Returned = TypeVar("Returned")
Hook = Callable[[Controller, Any], Waits[None] | None]
"""A method of :class:`Controller` for a hook, which takes the hook's argument.

It returns the blocking functions that the callback has to run, or ``None``.
"""

_callbacks: WeakSet[_Callback[Any]] = WeakSet()


def _leave_to_parent() -> None:
    """Let callbacks do nothing in a forked child:
    the captures and the run are those of its parent.
    """
    for callback in _callbacks:
        controller = callback._controller
        if controller is not None and controller.begun:
            controller.leave_to_parent()
            callback._controller = None


os.register_at_fork(after_in_child=_leave_to_parent)


class _Callback(Generic[Returned]):
    """The hooks that the synchronous and the asynchronous callback share.

    A hook of the synchronous callback blocks; a hook of the asynchronous callback is awaited.

    Args:
        config: Settings: a :class:`ProfilingConfig`, a dict, or an OmegaConf ``DictConfig``.

    Raises:
        ConfigError: The settings are wrong; all settings are checked here.

    Attributes:
        sink: Always ``None``; a stage looks for its receiver here when profiling is disabled.
    """

    sink: StageSink | None = None

    def __init__(self, config: ProfilingConfig | Mapping[str, Any] | None) -> None:
        self.config = ProfilingConfig.from_any(config)
        self._controller = Controller(self.config) if self.config.enable else None
        self._stages: dict[str, Stage] = {}
        _callbacks.add(self)

    @abstractmethod
    def _call(
        self,
        hook: Hook,
        argument: Any,
        loop_raised: bool = False,
    ) -> Returned:
        """Call a hook of the controller, and run the blocking functions that the hook returns.

        If ``loop_raised``, an exception of the training loop propagates, and no error here may
        replace it.
        """

    def on_step_begin(self, step: int, policy_version: int | None = None) -> Returned:
        """Begin a step; if the step is captured, start all workers concurrently.

        In discrete mode, the tools of a worker start later, with each selected stage.

        Args:
            step: Number of the step, as the loop counts it.
            policy_version: Version of the weights with which responses are generated, if the loop
                has one.

        Raises:
            TypeError: The step is not a whole number.
        """
        if self._controller is not None:
            try:
                step = index(step)
            except TypeError:
                kind = type(step).__name__
                raise TypeError(f"on_step_begin: a step is a whole number, not {kind}") from None
        return self._call(Controller.on_step_begin, (step, policy_version))

    def on_rollout_begin(self, in_background: bool = False) -> Returned:
        """Begin generation: open the stage ``rollout``; in discrete mode,
        rollout engines begin to record.

        Args:
            in_background: Whether generation overlaps the steps. If so, this hook opens no stage;
                :meth:`on_generation_begin` and :meth:`on_generation_end` do, for each batch.
        """
        return self._call(Controller.on_rollout_begin, in_background)

    def on_rollout_end(self, metrics: Mapping[str, Any] | None = None) -> Returned:
        """End generation: end the stage ``rollout``; in discrete mode, rollout engines stop
        recording.

        Args:
            metrics: Numbers to keep with the step. Values that are no numbers are left out; numbers
                that are not finite are listed in the manifest's notes.
        """
        return self._call(Controller.on_rollout_end, metrics)

    def on_step_end(self, metrics: Mapping[str, Any] | None = None) -> Returned:
        """End a step: stop all workers, collect their results, and write the step folder.

        Args:
            metrics: Numbers to keep with the step. Values that are no numbers are left out; numbers
                that are not finite are listed in the manifest's notes.

        Raises:
            ProfilingError: A capture failed, and the settings are strict.
        """
        return self._call(Controller.on_step_end, metrics)

    def on_generation_begin(self) -> None:
        """Begin the stage ``rollout`` of a batch that is generated in the background of the steps.

        Never waits, and may be called from any thread or task. Batches may overlap: the stage ends
        with the last one. Stages of the loop do not nest inside it.
        """
        self._guarded(Controller.on_generation_begin)

    def on_generation_end(self) -> None:
        """End the stage ``rollout`` of a batch that :meth:`on_generation_begin` began."""
        self._guarded(Controller.on_generation_end)

    def on_stages_end(self) -> None:
        """End the step now, for a loop that can call :meth:`on_step_end` only some time later.

        Never waits. The time until :meth:`on_step_end` is not part of the step.
        """
        self._guarded(Controller.on_stages_end)

    def on_exception(self, error: BaseException) -> Returned:
        """Close an open capture after the step raised, and keep its recordings.

        This hook never raises, not even with strict settings, because the user has to see
        ``error``.
        """
        note_failure(error, is_fatal=True)
        return self._call(Controller.on_exception, error, True)

    def on_train_end(self) -> Returned:
        """Close an open capture, and wait for artifacts that are being compressed."""
        return self._call(Controller.on_train_end, TRAINING_ENDED)

    def add_workers(
        self, role: str, workers: Any, *, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Add the workers of a role.

        They replace earlier workers of the role, e.g. after an actor has restarted.

        Args:
            role: Role of the workers, e.g. ``actor``. A group may be added under several roles;
                each process is called once.
            workers: A verl worker group, a ``WorkerProcesses``, a Ray actor handle, a local object,
                or an iterable of the latter two in order of rank. Each worker has the methods of
                ``CaptureMixin``.
            loop: Event loop on which a local object's coroutines run.

        Raises:
            ConfigError: There are no workers, or a worker has no capture methods.
        """
        if self._controller is not None:
            self._controller.roster.add(role, workers, loop)

    def add_rollout(self, replicas: Any, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Add the rollout replicas in order of their index; they replace earlier replicas.

        Args:
            replicas: As for :meth:`add_workers`; each has the methods of ``RolloutCaptureMixin``.
            loop: Event loop on which a local object's coroutines run.

        Raises:
            ConfigError: There are no workers, or a worker has no capture methods.
        """
        self.add_workers(ROLLOUT_ROLE, replicas, loop=loop)

    def stage(self, name: str) -> Stage:
        """Return a named stage of the training loop, as context manager or decorator.

        Raises:
            TypeError: The name is not text, e.g. a function under a bare ``@profiling.stage``.
            ValueError: The name is empty, or cannot be written as UTF-8.
        """
        try:
            return self._stages[name]
        except (KeyError, TypeError):
            made = Stage(self if self._controller is None else self._controller.stages, name)
            return self._stages.setdefault(made.name, made)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add numbers that the loop computed after ``on_step_end``, if the step is in the last
        capture.

        Args:
            step: Number of the step.
            metrics: The numbers, as for :meth:`ProfilingCallback.on_step_end`.
        """
        self._guarded(Controller.add_metrics, step, metrics)

    def add_note(self, text: str) -> None:
        """Add a sentence about this run to the notes of every later manifest."""
        if self._controller is not None:
            self._controller.run_notes.append(str(text))

    @property
    def watch(self) -> Watch | None:
        """The watch, which summarizes every step; ``None`` if it is switched off."""
        return self._controller.watch if self._controller is not None else None

    @property
    def capturing(self) -> bool:
        """Whether a step is being captured."""
        return self._controller is not None and self._controller.live is not None

    @property
    def requested(self) -> bool:
        """Whether a person has requested a capture (``verl-profiling trigger`` or SIGUSR2) that has
        not begun.
        """
        return self._controller is not None and self._controller.decisions.requested

    @property
    def last_folder(self) -> Path | None:
        """Step folder of the last capture that was written."""
        last = None if self._controller is None else self._controller.last
        return None if last is None else last.folder

    def _abandoned(self, controller: Controller, hook: str, error: Exception) -> Waits[None]:
        """Close the open capture after a hook failed."""
        try:
            yield from controller.close(f"{hook}: {in_a_line(error)}")
        except Exception as second:
            logger.error("%s: the capture could not be closed: %s", hook, in_a_line(second))

    def _guarded(self, hook: Callable[..., object], *arguments: Any) -> None:
        """Call a hook of the controller that waits for nothing; log its errors,
        so that training goes on.
        """
        if self._controller is not None:
            try:
                hook(self._controller, *arguments)
            except Exception as error:
                self._failed(hook.__name__, error)

    def _failed(self, hook: str, error: Exception, loop_raised: bool = False) -> None:
        """Handle the exception of a hook: log it, or raise it if the settings are strict.

        If ``loop_raised``, an exception of the training loop propagates, and this error must not
        replace it.
        """
        if self.config.strict and not loop_raised:
            raise error
        logger.error(
            "%s: profiling failed, training goes on: %s: %s", hook, type(error).__name__, error
        )
        logger.debug("traceback of %s", hook, exc_info=error)


replace_in_graphs(_Callback.stage, lambda self, name: stage_in_graph(name))


class ProfilingCallback(_Callback[None]):
    """Profiles a training loop that runs outside of an event loop.

    ``with ProfilingCallback(config) as profiling:`` around the loop calls :meth:`on_train_begin`
    and :meth:`on_train_end`, and :meth:`on_exception` if the loop raises. The loop's exception
    propagates unchanged. After the end of the ``with`` block, the same callback may be entered
    again.

    Args:
        config: The settings: a ``ProfilingConfig``, a dict, or an OmegaConf ``DictConfig``.
        blocks_event_loop: Allow hooks on a thread with a running event loop, although hooks block.
            For loops called by a coroutine.
    """

    def __init__(
        self, config: ProfilingConfig | Mapping[str, Any] | None, *, blocks_event_loop: bool = False
    ) -> None:
        super().__init__(config)
        self._blocks_event_loop = blocks_event_loop

    def __enter__(self) -> ProfilingCallback:
        """Begin training.

        Raises:
            CaptureStateError: An event loop runs on this thread.
        """
        self.on_train_begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End training; recordings are kept after an exception."""
        try:
            if error is not None:
                self.on_exception(error)
        finally:
            self._call(Controller.on_train_end, TRAINING_ENDED, error is not None)

    def on_train_begin(self) -> None:
        """Check the settings against the workers that were added, if any were.

        Raises:
            CaptureStateError: An event loop runs on this thread, which hooks must not block.
        """
        if self._controller is not None:
            self._refuse_event_loop()
            self._guarded(Controller.on_train_begin)

    def _call(
        self,
        hook: Hook,
        argument: Any,
        loop_raised: bool = False,
    ) -> None:
        controller = self._controller
        if controller is None:
            return
        try:
            waits = hook(controller, argument)
            if waits is not None:
                self._refuse_event_loop()
                with closing(waits):  # an interrupted hook ends here, not at garbage collection
                    for wait in waits:
                        wait()
        except Exception as error:
            for wait in self._abandoned(controller, hook.__name__, error):
                wait()
            self._failed(hook.__name__, error, loop_raised)

    def _refuse_event_loop(self) -> None:
        if self._blocks_event_loop or asyncio._get_running_loop() is None:
            return
        raise CaptureStateError(
            "ProfilingCallback: an event loop runs on this thread, and the hooks would block "
            "it; use "
            "AsyncProfilingCallback, or another thread, e.g. await asyncio.to_thread(trainer.train)"
        )


class AsyncProfilingCallback(_Callback[Coroutine[Any, Any, None]]):
    """Profiles a training loop that is a coroutine, without blocking the event loop.

    ``async with AsyncProfilingCallback(config) as profiling:`` works like ``with`` of
    :class:`ProfilingCallback`. Its hooks are the same, and are awaited, except hooks that never
    wait, such as :meth:`on_generation_begin`.
    """

    def __enter__(self) -> NoReturn:
        """Refuse ``with``.

        Raises:
            CaptureStateError: Always, with the remedy.
        """
        raise CaptureStateError("AsyncProfilingCallback: its hooks are awaited; write `async with`")

    def __exit__(self, *_: object) -> None:
        """Never called, but looked for by ``with``."""

    async def __aenter__(self) -> AsyncProfilingCallback:
        """See :meth:`ProfilingCallback.__enter__`."""
        await self.on_train_begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See :meth:`ProfilingCallback.__exit__`."""
        try:
            if error is not None:
                await self.on_exception(error)
        finally:
            await self._call(Controller.on_train_end, TRAINING_ENDED, error is not None)

    async def on_train_begin(self) -> None:
        """Check the settings against the workers that were added."""
        self._guarded(Controller.on_train_begin)

    async def _call(
        self,
        hook: Hook,
        argument: Any,
        loop_raised: bool = False,
    ) -> None:
        """Call a hook on the caller's task; only the hook's blocking functions run on another
        thread.

        A cancelled hook ends its work before it raises, so that no worker is busy in the next hook.
        """
        controller = self._controller
        if controller is None:
            return
        cancelled: list[asyncio.CancelledError] = []
        try:
            await _do(hook(controller, argument) or (), cancelled)
        except Exception as error:
            await _do(self._abandoned(controller, hook.__name__, error), cancelled)
            self._failed(hook.__name__, error, loop_raised)
        if cancelled:
            raise cancelled[0]


async def _do(
    waits: Iterable[Callable[[], object]], cancelled: list[asyncio.CancelledError]
) -> None:
    """Run blocking functions on other threads; append cancellations meanwhile to ``cancelled``."""
    for wait in waits:
        done = asyncio.ensure_future(asyncio.to_thread(wait))
        while not done.done():
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError as error:
                cancelled.append(error)
