"""Notices that the process of the loop is gone while its capture is open: nobody else will stop it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import CaptureResult
from verl_profiling.run_files import RESULT_SUFFIX, write_json_atomically

__all__ = ["LOOK_S", "OrphanWatch", "is_orphan", "leave_result"]

logger = logging.getLogger(__name__)

LOOK_S = 1.0


def is_orphan(request: CaptureRequest) -> bool:
    """Return whether the process that asked for a capture is known to be gone."""
    return request.loop is not None and request.loop.alive() is False


def leave_result(request: CaptureRequest, result: CaptureResult) -> None:
    """Write a result into the step folder, where ``verl-profiling recover`` finds it.

    In the process of the loop itself nothing is left: the loop has its result.
    """
    if not request.keep or request.loop in (None, ProcessId.current()):
        return
    path = Path(request.folder) / f"{result.name}{RESULT_SUFFIX}"
    try:
        write_json_atomically(path, result)
    except OSError as error:
        logger.error("step %d: the result of %s is lost: %s", request.step, result.identity, error)


class OrphanWatch:
    """Looks once a second, on a thread that lives as long as the capture.

    Where the process of the loop cannot be seen from here (it is on another host), there is no thread.

    Args:
        request: The capture.
        rescue: Closes the capture, and returns whether it could.
    """

    def __init__(self, request: CaptureRequest, rescue: Callable[[], bool]) -> None:
        self._request = request
        self._rescue = rescue
        self._over = threading.Event()
        if request.loop is not None and request.loop != ProcessId.current() and request.loop.alive():
            self._actor = _own_actor()
            threading.Thread(target=self._run, name="verl-profiling-watch", daemon=True).start()

    def end(self) -> None:
        """Stop looking: the capture is closed."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            if is_orphan(self._request):
                break
        else:
            return
        logger.warning(
            "step %d: %s, which captures, is gone; stopping the capture",
            self._request.step,
            self._request.loop,
        )
        if self._actor is not None:  # an idle actor's main thread, which owns the recording, runs only calls
            _orphans.append(self._rescue)
            self._actor.__ray_call__.remote(_rescue_on_this_thread)
        while not self._over.wait(LOOK_S) and not self._rescue():
            pass


_orphans: list[Callable[[], bool]] = []


def _rescue_on_this_thread(actor: object) -> None:
    while _orphans:
        _orphans.pop()()


def _own_actor() -> Any:
    """Return a handle of the Ray actor that this process is, or ``None``."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.current_actor if context.get_actor_id() is not None else None
