"""Detects that the processes of an engine ended while they were needed, and describes it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path

from verl_profiling.engines.adapter import EngineAdapter
from verl_profiling.errors import CaptureStateError

__all__ = ["death_of", "how_processes_ended", "while_alive"]

_LOOK_EVERY_S = 0.5
_DYING_S = 3.0  # an engine whose worker has died answers with some error first, and then ends


def death_of(engine: EngineAdapter) -> str:
    """Return a sentence on how an engine died and where its log is; empty while it lives."""
    how = engine.died()
    if not how:
        return ""
    remedy = "look there for the cause (PYTHONFAULTHANDLER=1 shows crashes), and start the engine anew"
    return f"{engine.name} died ({how}); its log is {_log_of_this_process()}: {remedy}"


async def while_alive(engine: EngineAdapter, call: Awaitable[None]) -> None:
    """Await a call to an engine, but give up if the engine dies, because no answer would come.

    Raises:
        CaptureStateError: The engine died.
        Exception: Whatever the call raised while the engine lives.
    """
    task = asyncio.ensure_future(call)
    try:
        while not task.done() and not death_of(engine):
            await asyncio.wait([task], timeout=_LOOK_EVERY_S)
    finally:
        task.cancel()
    error = task.exception() if task.done() else None
    if (error is not None or not task.done()) and (death := await _death_within(engine, _DYING_S)):
        raise CaptureStateError(death) from error
    await task


async def _death_within(engine: EngineAdapter, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while not (death := death_of(engine)) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)
    return death


def how_processes_ended(codes: Mapping[str, int]) -> str:
    """Return how processes ended, from their exit codes: ``EngineCore ended with SIGKILL``."""
    return ", ".join(f"{name} ended with {_code(code)}" for name, code in codes.items())


def _code(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def _log_of_this_process() -> str:
    """Return where an engine's processes write: to this process's output, unless told otherwise."""
    files = []
    for stream in (1, 2):
        path = Path(f"/proc/self/fd/{stream}")
        if path.is_file() and (target := str(path.readlink())) not in files:
            files.append(target)
    return " and ".join(files) or f"the output of process {os.getpid()} on {socket.gethostname()}"
