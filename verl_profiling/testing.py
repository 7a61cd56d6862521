"""Helpers for tests of loops that use ``verl_profiling``, and of tools written for it.

:func:`record_step` captures the test's process like a worker, :func:`shifted_clock` shifts its
clock like another host's, and :func:`leaks` lists recordings and threads that a test left behind.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiling import clock
from verl_profiling.capture.protocol import CaptureStart, StartReply
from verl_profiling.capture.session import process_session
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["RecordedStep", "leaks", "record_step", "shifted_clock"]

_FINISH_S = 60.0
_ENDS_BY_ITSELF = ("verl-profiling-finisher", "verl-profiling-after")


@dataclass
class RecordedStep:
    """The result of :func:`record_step`.

    Attributes:
        folder: The step folder.
        started: The reply to ``start_capture``.
        result: The worker's result, with finished artifacts; ``None`` until the block ends.
    """

    folder: Path
    started: StartReply
    result: CaptureResult | None = None

    @property
    def path(self) -> Path:
        """Path of the first artifact.

        Raises:
            LookupError: There is no artifact.
        """
        if self.result is None or not self.result.artifacts:
            raise LookupError(f"no artifact was recorded: {self.result}")
        return self.folder / self.result.artifacts[0].path


@contextmanager
def record_step(
    config: ProfilingConfig | Mapping[str, Any],
    folder: Path,
    *,
    role: str = "actor",
    rank: int = 0,
    step: int = 1,
    keep: bool = True,
) -> Iterator[RecordedStep]:
    """Capture this process during the block, without a callback.

    ::

        with record_step({"enable": True, "tool": "my_package.tools:MyTool"}, tmp_path) as recorded:
            with stage("update_actor"):
                train()
        assert recorded.result.status == "ok"

    Args:
        config: The settings, as for :class:`~verl_profiling.ProfilingCallback`.
        folder: The step folder, into which the tools write.
        role: The role that this process has, as a worker.
        rank: Its rank in the role.
        step: Number of the step.
        keep: ``False`` for a warm-up, whose recording is discarded.

    Raises:
        ConfigError: The settings are wrong.
        Exception: The exception of the tool at its start.
    """
    session = process_session()
    worker = WorkerIdentity(role=role, rank=rank)
    session.register(ProfilingConfig.from_any(config), worker)
    request = CaptureStart(
        capture_id=uuid.uuid4().hex, run_id="test", step=step, folder=str(folder), keep=keep
    )
    recorded = RecordedStep(folder, session.start(request, worker))
    try:
        yield recorded
    finally:
        recorded.result = session.stop(request.capture_id, _FINISH_S).result


@contextmanager
def shifted_clock(offset_ns: int, domain: str = "shifted") -> Iterator[None]:
    """Shift the wall clock of this process during the block, as on another host.

    Workers set up inside the block belong to another clock domain, so that the callback measures
    their offset. The clocks of profilers, e.g. Kineto's, are not shifted.

    Args:
        offset_ns: Shift of the clock, in nanoseconds.
        domain: Name of the shifted clock; workers with one name count as on one machine.
    """
    true_now_ns = clock.now_ns
    with clock.replaced(lambda: true_now_ns() + offset_ns, domain):
        yield


def leaks() -> list[str]:
    """Return sentences on recordings and threads that are left in this process; empty after a clean
    test.

    A thread that finishes artifacts or runs hooks is not a leak, because it ends with its work.
    """
    found = []
    if process_session().recording:
        found.append("a capture is open; call stop_capture()")
    torch = sys.modules.get("torch")
    if torch is not None and torch.autograd.profiler._is_profiler_enabled:
        found.append("a torch profiler records")
    for thread in threading.enumerate():
        if thread.name.startswith("verl-profiling") and thread.name not in _ENDS_BY_ITSELF:
            found.append(f"thread {thread.name} runs")
    return found
