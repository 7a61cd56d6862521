"""Capture methods for verl's plain Ray actors: agent-loop workers and reward-loop workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply
from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.integrations.hooks import misfits as misfits_here
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch.reading import WatchReading
from verl_profiling.workers import AgentLoopCaptureMixin

__all__ = ["add_actors", "add_capture_methods"]

logger = logging.getLogger(__name__)


def add_capture_methods(actor_class: type[Any], mixin: type[AgentLoopCaptureMixin]) -> None:
    """Add the methods to a class, before ``ray.remote`` makes actors of it.

    They are no coroutines, so that one thread, the event loop's, starts and stops a recording.
    """

    def init_capture(self: Any, settings: ProfilingConfig, rank: int, world_size: int) -> list[str]:
        """Set this worker up; return what does not fit in its process."""
        capture = mixin()
        capture.init_capture(settings, rank=rank, world_size=world_size)
        self._verl_profiling = capture
        return misfits_here()

    actor_class.init_capture = init_capture
    actor_class.start_capture = _start_capture
    actor_class.stop_capture = _stop_capture
    actor_class.read_watch = _read_watch
    actor_class._verl_profiling = mixin()


def _start_capture(self: Any, request: CaptureRequest) -> StartReply:
    """Start or join a capture. The callback calls this."""
    capture: AgentLoopCaptureMixin = self._verl_profiling
    return capture.start_capture(request)


def _stop_capture(self: Any, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
    """Stop a capture. The callback calls this."""
    capture: AgentLoopCaptureMixin = self._verl_profiling
    return capture.stop_capture(capture_id, finish_s)


def _read_watch(self: Any, since_ns: int | None = None) -> WatchReading | None:
    """Return what the watch keeps of this process. The callback calls this."""
    capture: AgentLoopCaptureMixin = self._verl_profiling
    return capture.read_watch(since_ns)


def add_actors(
    callback: ProfilingCallback | AsyncProfilingCallback,
    settings: ProfilingConfig,
    role: str,
    handles: Sequence[Any],
    misfits: list[str],
) -> bool:
    """Set actors up and add them to the callback; ones that cannot be captured are left out, by name.

    Args:
        callback: The trainer's callback.
        settings: What to profile.
        role: Their role.
        handles: Their handles, in order of rank.
        misfits: Gets appended what does not fit in their processes.

    Returns:
        Whether they were added.
    """
    if not handles or not settings.for_role(role).enable:
        return False
    without = [handle for handle in handles if not hasattr(handle, "init_capture")]
    if without:
        logger.warning(
            "profiling: %d of %d workers of role %r are of a class without capture methods, and the role is "
            "not recorded; let the class inherit verl's own, or a mixin of verl_profiling.workers",
            len(without),
            len(handles),
            role,
        )
        return False
    try:
        import ray

        # Training waits for these actors as well, however long they take to come up.
        for found in ray.get(
            [
                handle.init_capture.remote(settings, rank=rank, world_size=len(handles))
                for rank, handle in enumerate(handles)
            ]
        ):
            misfits += found or ()
    except Exception as error:
        if settings.strict:
            raise
        logger.warning("profiling: role %r is not recorded: %s: %s", role, type(error).__name__, error)
        return False
    callback.add_workers(role, handles)
    return True
