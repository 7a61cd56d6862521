"""Workers that tests drive: the real mixin, in this process or in Ray actors,
with switches that hang it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from example_loops import train

from verl_profiling import ProfilingConfig, span, stage, trajectory
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply
from verl_profiling.capture.session import process_session
from verl_profiling.testing import shifted_clock
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
)


def once_all_hang(
    switches: Path, switch: str, workers: int, do: Callable[[], object]
) -> threading.Thread:
    """Start a thread that does something as soon as so many workers hang at a switch."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while (
            len(list(switches.glob(f"{switch}_hangs_*"))) < workers and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


class TrainWorker(CaptureMixin):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.switches: Path | None = None
        self._clock = contextlib.ExitStack()

    def set_up(
        self,
        config: ProfilingConfig,
        role: str = "actor",
        rank: int = 0,
        *,
        switches: Path | None = None,
        clock_ns: int = 0,
        reset: bool = True,
    ) -> int:
        """Set up as if in a new process; return the process's id."""
        self._clock.close()
        if reset:
            process_session().leave()
            process_session().reset()
            self._capture_roles = {}
        if clock_ns:
            self._clock.enter_context(shifted_clock(clock_ns))
        self.calls.clear()
        self.switches = switches
        self.init_capture(config, role=role, rank=rank, world_size=2)
        return os.getpid()

    def is_idle(self) -> bool:
        return not process_session().recording

    def also(self, config: ProfilingConfig, role: str) -> None:
        self.init_capture(config, role=role)

    def counts(self) -> dict[str, int]:
        """Return how often the capture methods were called."""
        return dict(self.calls)

    def start_capture(self, request: CaptureStart) -> StartReply:
        self.calls["start_capture"] += 1
        self._hang("start")
        return super().start_capture(request)

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        self.calls["stop_capture"] += 1
        self._hang("stop")
        return super().stop_capture(capture_id, finish_s)

    def work(self, names: Sequence[str] = ("update_actor",), seconds: float = 0.0) -> None:
        self._hang("work")
        for name in names:
            with stage(name):
                train()
                self._hang("stage")
                time.sleep(seconds)

    def pass_stages(self, names: Sequence[str]) -> None:
        """Run stages in which nothing is trained: torch takes a new process seconds to import."""
        for name in names:
            with stage(name):
                pass

    def drift(self, ns: int) -> None:
        self._clock.enter_context(shifted_clock(ns))

    def _hang(self, switch: str) -> None:
        if self.switches is not None and (self.switches / switch).exists():
            (self.switches / f"{switch}_hangs_{os.getpid()}").touch()
            while (self.switches / switch).exists():
                time.sleep(0.01)


class Reborn(TrainWorker):
    """A worker that sets itself up, so that it is ready again after Ray has restarted it."""

    def __init__(self, config: ProfilingConfig) -> None:
        super().__init__()
        self.set_up(config)

    def die(self) -> None:
        os._exit(1)


class AsyncWorker(TrainWorker):
    """As an inference server: one coroutine makes all methods of a Ray actor run
    on its event loop.
    """

    async def generate(self, seconds: float = 0.05) -> str:
        with stage("generate"):
            await asyncio.sleep(seconds)
        return "text"


class Engine(RolloutCaptureMixin):
    """A rollout engine without requests of its own."""

    def set_up(self, config: ProfilingConfig, replica: int) -> None:
        self.init_capture(config, replica=replica, requests=RequestLog())

    async def generate(self, seconds: float) -> None:
        with stage("rollout"):
            await asyncio.sleep(seconds)

    def start_process(self) -> int:
        """Start a process through a shell, as an engine starts its core; return the id."""
        self.shell = subprocess.Popen(
            ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE
        )
        assert self.shell.stdout is not None
        return int(self.shell.stdout.readline())


class Agents(AgentLoopCaptureMixin):
    def set_up(self, config: ProfilingConfig) -> None:
        """Set up as if in a new process."""
        process_session().leave()
        process_session().reset()
        self._capture_roles = {}
        self.init_capture(config)

    async def run(self, engines: Sequence[Any], seconds: Sequence[float]) -> None:
        with stage("rollout"):
            await asyncio.gather(
                *(
                    self._trajectory(engine, own)
                    for engine, own in zip(engines, seconds, strict=True)
                )
            )

    async def call_tool(self, switch: Path, blocks: bool = False) -> None:
        """Call a tool that does not return while a file exists."""
        async with trajectory(group="p7", sample=3), span("tool:search", turn=2):
            while switch.exists():
                if blocks:
                    time.sleep(0.05)
                else:
                    await asyncio.sleep(0.05)

    async def call_tools(self, switches: list[Path]) -> None:
        """Call tools one after another."""
        for switch in switches:
            await self.call_tool(switch)

    async def _trajectory(self, engine: Any, seconds: float) -> None:
        async with trajectory(group="prompt"):
            await engine.generate.remote(seconds)


class CoroutineWorker:
    """A local worker whose capture methods are coroutines."""

    def __init__(self, config: ProfilingConfig, role: str = "rollout") -> None:
        self.inner = TrainWorker()
        self.inner.set_up(config, role)

    async def start_capture(self, request: CaptureStart) -> StartReply:
        await asyncio.sleep(0.01)
        return self.inner.start_capture(request)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        await asyncio.sleep(0.01)
        return self.inner.stop_capture(capture_id, finish_s)


class WorkerGroup:
    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)
        self.calls: list[str] = []

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls.append(method_name)
        return [getattr(worker, method_name).remote(*args, **kwargs) for worker in self.workers]
