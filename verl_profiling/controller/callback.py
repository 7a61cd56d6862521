"""The trainer callbacks: the hooks a training loop calls.

::

    on_train_begin
    for step in ...:
        on_step_begin(step)
        on_rollout_begin ... generation ... on_rollout_end(metrics)
        with stage("update_actor"): ...
        on_step_end(metrics)
    on_train_end

A step that is not profiled costs no call to any worker, and about a microsecond a hook.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_profiling.capture.stage import Stage, StageSink
from verl_profiling.controller.hooks import Controller
from verl_profiling.controller.targets import Round
from verl_profiling.errors import CaptureStateError
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["AsyncProfilingCallback", "ProfilingCallback"]

logger = logging.getLogger(__name__)


class _Callback:
    """What both callbacks share: setting up, and stages.

    Args:
        config: Settings: a :class:`ProfilingConfig`, a dict, or an OmegaConf ``DictConfig``.

    Raises:
        ConfigError: The settings are wrong. Nothing later complains about them.

    Attributes:
        sink: Where stages go when profiling is disabled: nowhere.
    """

    sink: StageSink | None = None

    def __init__(self, config: ProfilingConfig | Mapping[str, Any] | None) -> None:
        self.config = ProfilingConfig.from_any(config)
        self._controller = Controller(self.config) if self.config.enable else None
        self._stages: dict[str, Stage] = {}

    def add_workers(self, role: str, workers: Any, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Add the workers of a role.

        Args:
            role: What they are, e.g. ``actor``. One group may be added under several roles;
                each process is driven once.
            workers: A verl worker group, a Ray actor handle, a local object, or an iterable of
                the latter two in order of rank. Each has the methods of ``CaptureMixin``.
            loop: Event loop on which a local object's coroutines run.

        Raises:
            ConfigError: There are none, or one has no capture methods.
        """
        if self._controller is not None:
            self._controller.add(role, workers, is_rollout=False, loop=loop)

    def add_rollout(self, replicas: Any, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Add the rollout replicas, in order of their index.

        Args:
            replicas: As for :meth:`add_workers`; each has the methods of ``RolloutCaptureMixin``.
            loop: Event loop on which a local object's coroutines run.

        Raises:
            ConfigError: There are none, or one has no capture methods.
        """
        if self._controller is not None:
            self._controller.add("rollout", replicas, is_rollout=True, loop=loop)

    def stage(self, name: str) -> Stage:
        """Return a stage of the controller, as context manager or decorator."""
        try:
            return self._stages[name]
        except KeyError:
            return self._stages.setdefault(
                name, Stage(self if self._controller is None else self._controller, name)
            )

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep numbers that the loop computed after ``on_step_end`` with their step, if it was captured.

        Args:
            step: Number of the step.
            metrics: The numbers; other values are left out.
        """
        if self._controller is not None:
            try:
                self._controller.add_metrics(step, metrics)
            except OSError as error:
                self._failed("add_metrics", error)

    @property
    def last_folder(self) -> Path | None:
        """Step folder of the last capture that was written."""
        return self._controller.last_folder if self._controller is not None else None

    def _wanting(self, step: int) -> Controller | None:
        controller = self._controller
        return controller if controller is not None and controller.wants(step) else None

    def _live(self) -> Controller | None:
        controller = self._controller
        return controller if controller is not None and controller.live is not None else None

    def _failed(self, hook: str, error: Exception) -> None:
        """The one failure boundary of the hooks: training goes on unless the settings are strict."""
        if self.config.strict:
            raise error
        logger.error("%s: profiling failed, training goes on: %s: %s", hook, type(error).__name__, error)
        logger.debug("%s", hook, exc_info=error)


class ProfilingCallback(_Callback):
    """Profiles a training loop that runs outside of an event loop."""

    def on_train_begin(self) -> None:
        """Check the settings against the workers that were added.

        Raises:
            CaptureStateError: An event loop runs on this thread; its hooks must not block.
        """
        if self._controller is not None:
            _refuse_event_loop()
            self._controller.check_selection()

    def on_step_begin(self, step: int, policy_version: int | None = None) -> None:
        """Begin a step; a profiled one starts or arms every worker at once.

        Args:
            step: Number of the step, as the loop counts it.
            policy_version: Version of the weights that generate, where the loop reports one.
        """
        if (controller := self._wanting(step)) is not None:
            self._drive("on_step_begin", controller.step_begin(step, policy_version))

    def on_rollout_begin(self) -> None:
        """Begin generation: opens the window of rollout engines in discrete mode."""
        if (controller := self._live()) is not None:
            self._drive("on_rollout_begin", controller.rollout_begin())

    def on_rollout_end(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End generation.

        Args:
            metrics: Numbers to keep with the step; other values are left out.
        """
        if (controller := self._live()) is not None:
            self._drive("on_rollout_end", controller.rollout_end(metrics))

    def on_step_end(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End a step: stops all workers, collects their results, writes the step folder.

        Args:
            metrics: Numbers to keep with the step; other values are left out.

        Raises:
            ProfilingError: A capture failed, and the settings are strict.
        """
        if (controller := self._live()) is not None:
            self._drive("on_step_end", controller.step_end(metrics))

    def on_exception(self, error: BaseException) -> None:
        """Close an open capture after the step raised, and keep what was recorded."""
        if (controller := self._live()) is not None:
            logger.warning("closing the capture after %s: %s", type(error).__name__, error)
            self._drive("on_exception", controller.close(complete=False))

    def on_train_end(self) -> None:
        """Close what is open, and wait for artifacts that are being compressed."""
        if self._controller is not None:
            self._drive("on_train_end", self._controller.train_end())

    def _drive(self, hook: str, rounds: Iterator[Round]) -> None:
        try:
            _refuse_event_loop()
            for round_ in rounds:
                round_.wait()
        except Exception as error:
            self._failed(hook, error)


class AsyncProfilingCallback(_Callback):
    """Profiles a training loop that is a coroutine: nothing in it blocks the event loop."""

    async def on_train_begin(self) -> None:
        """Check the settings against the workers that were added."""
        if self._controller is not None:
            self._controller.check_selection()

    async def on_step_begin(self, step: int, policy_version: int | None = None) -> None:
        """See :meth:`ProfilingCallback.on_step_begin`."""
        if (controller := self._wanting(step)) is not None:
            await self._drive("on_step_begin", controller.step_begin(step, policy_version))

    async def on_rollout_begin(self) -> None:
        """See :meth:`ProfilingCallback.on_rollout_begin`."""
        if (controller := self._live()) is not None:
            await self._drive("on_rollout_begin", controller.rollout_begin())

    async def on_rollout_end(self, metrics: Mapping[str, Any] | None = None) -> None:
        """See :meth:`ProfilingCallback.on_rollout_end`."""
        if (controller := self._live()) is not None:
            await self._drive("on_rollout_end", controller.rollout_end(metrics))

    async def on_step_end(self, metrics: Mapping[str, Any] | None = None) -> None:
        """See :meth:`ProfilingCallback.on_step_end`."""
        if (controller := self._live()) is not None:
            await self._drive("on_step_end", controller.step_end(metrics))

    async def on_exception(self, error: BaseException) -> None:
        """See :meth:`ProfilingCallback.on_exception`."""
        if (controller := self._live()) is not None:
            logger.warning("closing the capture after %s: %s", type(error).__name__, error)
            await self._drive("on_exception", controller.close(complete=False))

    async def on_train_end(self) -> None:
        """See :meth:`ProfilingCallback.on_train_end`."""
        if self._controller is not None:
            await self._drive("on_train_end", self._controller.train_end())

    async def _drive(self, hook: str, rounds: Iterator[Round]) -> None:
        try:
            for round_ in rounds:
                await round_.wait_async()
        except Exception as error:
            self._failed(hook, error)


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise CaptureStateError(
        "ProfilingCallback: an event loop runs on this thread, and the hooks would block it; "
        "use AsyncProfilingCallback"
    )
