"""A training loop in which something goes wrong in nearly every step,
by a plan that a seed makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from fault_tools import FAULTY

from verl_profiling import ProfilingCallback, ProfilingConfig, stage
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply
from verl_profiling.cli import main
from verl_profiling.engines.adapter import SPOOL_PARENT, EngineAdapter
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import MANIFEST_NAME
from verl_profiling.settings.config import RolloutOptions
from verl_profiling.steps.check import check
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool
from verl_profiling.workers import CaptureMixin

WORKERS = ("actor_rank0", "actor_rank1", "critic_rank0")
CRITIC_STAGES = ("values", "update_critic")
RANKS = 2
TRACE = json.dumps(
    {"traceEvents": [{"ph": "X", "name": "kernel", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}
)
ENGINE = ("rollout0_rank0.torch.json.gz", "rollout0_rank1.torch.json.gz")
IN_THE_TOOL = {
    "a tool raises at its start": "start raises",
    "a tool raises at its stop": "stop raises",
    "a tool raises at its export": "export raises",
    "the disk is full": "disk full",
    "a worker is killed while it writes": "killed while writing",
}
IN_THE_ENGINE = {
    "an engine dies": "died",
    "an engine raises at its stop": "stop raises",
    "an engine writes no trace": "no trace",
}
KINDS = (
    "nothing",
    *IN_THE_TOOL,
    *IN_THE_ENGINE,
    "a worker raises at the start",
    "a worker hangs at the start",
    "a worker hangs at the stop",
    "a worker dies in the step",
    "the manifest cannot be written",
    "a step's end is left out",
    "hooks come out of order",
    "the loop raises",
)
LEFT_EARLY = ("a step's end is left out", "the loop raises")
"""Kinds that damage nothing, and yet ``check`` names the step."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a step, and with whom."""

    step: int
    kind: str
    lane: str

    @property
    def place(self) -> str:
        """Where a plan has it: a tool of the critic records by stage, and its last one is hit."""
        by_stage = self.lane.startswith("critic") and self.kind in IN_THE_TOOL
        return "/".join((str(self.step), self.lane, *CRITIC_STAGES[-1:] * by_stage))

    def damaged(self) -> set[str]:
        if self.kind in IN_THE_ENGINE:
            return set(ENGINE)
        own = {name for name in expected() if name.startswith(f"{self.lane}.")}
        if self.kind in IN_THE_TOOL or self.kind == "a worker dies in the step":
            return {name for name in own if CRITIC_STAGES[0] not in name}
        return (
            own
            if self.kind in ("a worker raises at the start", "a worker hangs at the start")
            else set()
        )


def expected() -> set[str]:
    critic = {f"critic_rank0.{name}.faulty.json.gz" for name in CRITIC_STAGES}
    return {f"{lane}.faulty.json.gz" for lane in WORKERS[:2]} | critic | set(ENGINE)


def faults(seed: int, kinds: Sequence[str], steps: int) -> list[Fault]:
    """Return the plan of a seed: every kind in turn, in random order, at random workers."""
    dice = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < steps:
        drawn += dice.sample(kinds, len(kinds))
    return [
        Fault(step, kind, dice.choice(WORKERS)) for step, kind in enumerate(drawn[:steps], start=1)
    ]


class FaultyWorker(CaptureMixin):
    """A worker in a Ray actor, which Ray restarts when it dies."""

    def __init__(self, config: dict[str, Any], role: str, rank: int, plan: Path) -> None:
        self._plan = plan
        self._lane = f"{role}_rank{rank}"
        self._step = 0
        self.init_capture(config, role=role, rank=rank, world_size=2)

    def start_capture(self, request: CaptureStart) -> StartReply:
        fault = self._fault(request.step)
        while self._fault(request.step) == "a worker hangs at the start":
            time.sleep(0.02)
        if fault == "a worker raises at the start":
            raise RuntimeError("planned")
        return super().start_capture(request)

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        while self._step and self._fault(self._step) == "a worker hangs at the stop":
            time.sleep(0.02)
        return super().stop_capture(capture_id, finish_s)

    def work(self, step: int) -> int:
        """Run a step's stages; 0 only asks whether the worker is there."""
        self._step = step
        for name in CRITIC_STAGES if step else ():
            with stage(name):
                pass
            if self._fault(step) == "a worker dies in the step":
                os._exit(1)
        return step

    def _fault(self, step: int) -> str:
        fault: str = json.loads(self._plan.read_text()).get(f"{step}/{self._lane}", "")
        return fault


class StandIn(EngineAdapter):
    """An engine of two ranks that fails as it is told to."""

    name = "stand-in"
    device = "cpu"
    window = RolloutOptions()
    ranks = RANKS
    tool = TorchTool(TorchOptions())

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.records = False
        self.fault = ""
        self._starts = 0

    async def start(self) -> None:
        self._answer("start")
        self.records, self._starts = True, self._starts + 1

    async def stop(self) -> None:
        self.records = False
        self._answer("stop")
        for rank in range(RANKS if self.fault != "no trace" else 0):
            (self.spool / f"{self._starts}.{rank}.json").write_text(TRACE)

    def identify(self, path: Path) -> int | None:
        return int(path.name.split(".")[1])

    def died(self) -> str:
        return "core ended with SIGKILL" if self.fault == "died" else ""

    def _answer(self, method: str) -> None:
        if self.fault in (f"{method} raises", "died"):
            raise RuntimeError("planned")


class Server:
    """A rollout server in the loop's process, whose engine is a stand-in."""

    def __init__(self, config: dict[str, Any]) -> None:
        checked = ProfilingConfig.from_any(config)
        replica = WorkerIdentity(role="rollout", replica=0)
        self.engine = StandIn(Path(checked.save_path) / SPOOL_PARENT / "engine")
        self._recorder = EngineRecorder(self.engine, replica, checked, RequestLog())

    async def start_capture(self, request: CaptureStart) -> StartReply:
        return await self._recorder.start_capture(request)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        return await self._recorder.stop_capture(capture_id, finish_s)


class FaultRun:
    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._plan_file = folder / "plan.json"
        self._plan({})
        self._run = folder / "run"
        config = {
            "enable": True,
            "save_path": str(self._run),
            "tool": FAULTY,
            "tools": {FAULTY: {"plan": str(self._plan_file)}},
            "roles": {"critic": {"mode": "discrete"}, "rollout": {"tool": "torch"}},
            "timeouts": {"start_s": timeout_s, "stop_s": timeout_s, "finish_s": 60},
        }
        remote = ray.remote(num_cpus=0, max_restarts=-1)(FaultyWorker)
        ranks = (("actor", 0), ("actor", 1), ("critic", 0))
        self._workers = [remote.remote(config, role, rank, self._plan_file) for role, rank in ranks]
        self._loop = asyncio.new_event_loop()
        self._server = Server(config)
        self._callback = ProfilingCallback(config)
        self._callback.add_workers("actor", self._workers[:2])
        self._callback.add_workers("critic", self._workers[2:])
        self._callback.add_rollout(self._server, loop=self._loop)

    def train(self, plan: list[Fault]) -> list[str]:
        """Run all steps; return of each that is not as promised what was seen."""
        self._wait_for_workers()
        with self._callback:
            for fault in plan:
                self._break(fault)
                self._step(fault)
                self._mend()
        return [seen for fault in plan if (seen := self._look_at(fault))]

    def end(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _step(self, fault: Fault) -> None:
        callback, step = self._callback, fault.step
        if fault.kind == "hooks come out of order":
            callback.on_rollout_end()
            callback.on_step_end()
        callback.on_step_begin(step)
        if fault.kind == "hooks come out of order":
            callback.on_rollout_end()
            callback.on_rollout_begin()
        callback.on_rollout_begin()
        callback.on_rollout_end()
        try:
            with callback.stage("update_actor"):
                self._work(step)
                if fault.kind == "the loop raises":
                    raise ValueError("planned")
        except ValueError as error:
            callback.on_exception(error)
        if fault.kind == "an engine dies":
            self._server.engine.fault = "died"
        if fault.kind == "the manifest cannot be written":
            self._block(self._folder(step) / MANIFEST_NAME)
        if fault.kind != "a step's end is left out":
            callback.on_step_end({"reward": 0.5})
        if fault.kind == "hooks come out of order":
            callback.on_step_end()

    def _block(self, manifest: Path) -> None:
        """Put a folder in its place; that the capture has begun may be written
        at the same moment.
        """
        while not manifest.is_dir():
            manifest.unlink(missing_ok=True)
            try:
                manifest.mkdir()
            except FileExistsError:
                continue

    def _work(self, step: int) -> None:
        for answer in [worker.work.remote(step) for worker in self._workers]:
            try:
                ray.get(answer, timeout=0 if self._hangs else 60)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                pass  # as a loop that survives the loss of a worker

    def _break(self, fault: Fault) -> None:
        self._hangs = fault.kind == "a worker hangs at the start"
        if fault.kind != "an engine dies":  # that is later in the step
            self._server.engine.fault = IN_THE_ENGINE.get(fault.kind, "")
        self._plan({fault.place: IN_THE_TOOL.get(fault.kind, fault.kind)})

    def _mend(self) -> None:
        self._plan({})
        self._server.engine.fault, self._server.engine.records = "", False
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        for worker in self._workers:
            while True:
                try:
                    ray.get(worker.work.remote(0), timeout=60)
                    break
                except ray.exceptions.RayActorError:
                    time.sleep(0.05)

    def _plan(self, plan: dict[str, str]) -> None:
        part = self._plan_file.with_suffix(".new")
        part.write_text(json.dumps(plan))
        part.replace(self._plan_file)

    def _folder(self, step: int) -> Path:
        return self._run / f"step_{step:06d}"

    def _look_at(self, fault: Fault) -> str:
        """Return what was lost of a step without being damaged,
        or that ``check`` is wrong of it.
        """
        folder = self._folder(fault.step)
        unwritten = fault.kind == "the manifest cannot be written"
        # Without a manifest, each file stands for itself.
        files = (
            [file for file in folder.glob("*.json*") if file.is_file()] if unwritten else [folder]
        )
        entries = [entry for file in files for entry in check(file).artifacts]
        kept = {entry.path.removesuffix(".gz") for entry in entries if entry.status == "ok"}
        lost = {name.removesuffix(".gz") for name in expected() - fault.damaged()} - kept
        code = main(["check", str(folder)])
        named = fault.damaged() or unwritten or fault.kind in LEFT_EARLY
        if not lost and code == (1 if named else 0):
            return ""
        return f"{fault}: check exits {code}; not kept: {sorted(lost)}; {entries}"
