"""A thousand workers: called side by side, with one manifest, and without a driver that grows."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_callback import configured, following, manifest, pass_steps

from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply
from verl_profiling.clock import now_ns
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult

THOUSAND = 1024
MANY, HOSTS = 64, 16
SAMPLES = 8


class Gathering:
    """Lets calls return once as many are under way as there are workers;
    a call that waits in vain fails.
    """

    def __init__(self, size: int) -> None:
        self._size, self._here, self._late = size, Counter[str](), False

    async def meet(self, method: str) -> None:
        self._here[method] += 1
        deadline_s = time.monotonic() + 15
        while self._here[method] < self._size:
            await asyncio.sleep(0.1)
            self._late |= time.monotonic() > deadline_s
            assert not self._late, "the others are not called meanwhile"


class Fake:
    """A worker that only answers."""

    def __init__(self, rank: int, gathering: Gathering | None = None) -> None:
        self.identity = WorkerIdentity(role="actor", rank=rank)
        self._gathering = gathering

    async def start_capture(self, request: CaptureStart) -> StartReply:
        begin_ns = now_ns()
        await self._do("start_capture")
        return StartReply(self.identity, "recording", begin_ns)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        begin_ns = now_ns()
        await self._do("stop_capture")
        result = CaptureResult(
            identity=self.identity, capture_id=capture_id or "", status="ok", step=1
        )
        return StopReply(result, received_ns=begin_ns)

    async def _do(self, method: str) -> None:
        if self._gathering is not None:
            await self._gathering.meet(method)


def test_a_thousand_workers_are_called_side_by_side(tmp_path: Path) -> None:
    """All starts are under way at once, and so are all stops; they end in one manifest."""
    gathering = Gathering(THOUSAND)
    config = configured(tmp_path)
    callback = following(config, [Fake(rank, gathering) for rank in range(THOUSAND)])
    pass_steps(callback, 2)
    assert [worker.identity.rank for worker in manifest(config).workers] == list(range(THOUSAND))
    assert {worker.status for worker in manifest(config).workers} == {"ok"}


@pytest.mark.parametrize("grouped", [True, False], ids=["one group", "one by one"])
def test_calls_grow_with_workers_plus_hosts(tmp_path: Path, grouped: bool) -> None:
    """Clocks of other hosts cost some calls each; each is measured often,
    at the start and at the stop.
    """
    calls: Counter[str] = Counter()

    class Counted(Fake):
        async def _do(self, method: str) -> None:
            calls[method] += 1

    class Group:
        """Workers that can only be called all at once."""

        def __init__(self, workers: list[Counted]) -> None:
            self.workers = workers

        def execute_all_async(self, method: str, *arguments: Any) -> list[Any]:
            return [asyncio.run(getattr(worker, method)(*arguments)) for worker in self.workers]

    workers = []
    for rank in range(MANY):
        host = f"host{rank * HOSTS // MANY}"
        workers.append(worker := Counted(rank))
        worker.identity = WorkerIdentity(role="actor", rank=rank, host=host, clock_domain=host)
    config = configured(tmp_path)
    callback = following(config, Group(workers) if grouped else workers)
    callback.on_step_begin(2)
    assert calls["start_capture"] <= 2 * MANY + SAMPLES * HOSTS
    callback.on_step_end()
    assert calls["stop_capture"] <= 2 * MANY + SAMPLES * HOSTS
    clocks = manifest(config).clocks
    assert len(clocks) == HOSTS
    assert all(clock.samples >= 2 * SAMPLES for clock in clocks)
