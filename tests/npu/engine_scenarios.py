"""Captures of engines on an NPU, run by ``test_ascend.py`` in a process
that sees the stand-in CANN.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch_npu  # noqa: F401  before the processes are forked

from tests.npu.engine_workers import Processes, VllmWorker, make_scheduler
from verl_profiling import AsyncProfilingCallback
from verl_profiling.files.run_files import read_manifest
from verl_profiling.workers import RequestLog, SGLangCaptureMixin, VLLMCaptureMixin

OUTCOMES = "outcomes.json"
RANKS = 2
ITERATIONS = 6


class VllmEngine:
    def __init__(self, profiler_config: Any) -> None:
        self.processes = Processes(partial(VllmWorker, profiler_config), RANKS, daemon=True)
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="npu"),
            profiler_config=profiler_config,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=RANKS, pipeline_parallel_size=1, data_parallel_size=1
            ),
        )

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start, as vLLM's executor does: workers that take no window are sent none."""
        if delay_iterations is not None or max_iterations is not None:
            raise ValueError("does not support per-session profiling overrides")
        await asyncio.to_thread(self.processes.call, "profile", True, profile_prefix)

    async def stop_profile(self) -> None:
        await asyncio.to_thread(self.processes.call, "profile", False)

    async def generate(self) -> None:
        for _ in range(ITERATIONS):
            await asyncio.to_thread(self.processes.call, "execute_model")


VllmEngine.__module__ = "vllm.v1.engine.async_llm"


class SGLangEngine:
    """What the capture uses of an SGLang ``Engine``: its tokenizer manager, up to 0.5.14."""

    def __init__(self, store: Path) -> None:
        self.processes = Processes(partial(make_scheduler, store, RANKS), RANKS, daemon=False)
        self.tokenizer_manager = self
        self.server_args = SimpleNamespace(tp_size=RANKS, pp_size=1, dp_size=1, device="npu")
        self.event_loop = None

    async def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: list[str] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
        profile_by_stage: bool = False,
        merge_profiles: bool = False,
        profile_prefix: str | None = None,
        profile_stages: list[str] | None = None,
    ) -> None:
        await self._send(
            "START_PROFILE",
            output_dir=output_dir,
            start_step=start_step,
            num_steps=num_steps,
            activities=activities,
            with_stack=with_stack is not False,
            record_shapes=record_shapes is not False,
            profile_by_stage=profile_by_stage,
            profile_id="1",
            merge_profiles=merge_profiles,
            profile_prefix=profile_prefix,
            profile_stages=profile_stages,
        )

    async def stop_profile(self) -> None:
        await self._send("STOP_PROFILE")

    async def generate(self) -> None:
        for _ in range(ITERATIONS):
            await asyncio.to_thread(self.processes.call, "run_batch")

    async def _send(self, kind: str, **fields: Any) -> None:
        from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

        request = ProfileReq(type=ProfileReqType[kind], **fields)
        reply, *_ = await asyncio.to_thread(self.processes.call, "profile", request)
        if not reply.success:
            raise RuntimeError(reply.message)


def main(root: Path) -> None:
    windows = {"start": 2, "count": 3}
    configs = {
        "vllm_e2e": settings(root / "vllm_e2e", "e2e", [2], rollout=windows, memory=True),
        "vllm_discrete": settings(
            root / "vllm_discrete", "discrete", [1, 3], modules=True, analysis=False
        ),
        "sglang_e2e": settings(
            root / "sglang_e2e", "e2e", [2], rollout={"count": 3}, activities=["cpu"]
        ),
        "sglang_discrete": settings(root / "sglang_discrete", "discrete", [1, 3], shapes=True),
    }
    of_sglang = SGLangEngine(root / "store")  # it takes its options with each start
    engines = {  # before there are threads: their processes are forked
        name: VllmEngine(VLLMCaptureMixin.engine_args(config)["profiler_config"])
        if name.startswith("vllm")
        else of_sglang
        for name, config in configs.items()
    }
    results = {}
    for name, config in configs.items():
        server = VLLMCaptureMixin() if name.startswith("vllm") else SGLangCaptureMixin()
        results[name] = asyncio.run(run(root / name, config, server, engines[name]))
    (root / OUTCOMES).write_bytes(msgspec.json.encode(results))
    for engine in {*engines.values()}:
        engine.processes.end()


def settings(
    root: Path, mode: str, steps: list[int], rollout: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    return {
        "enable": True,
        "tool": "npu",
        "mode": mode,
        "save_path": str(root),
        "schedule": {"steps": steps},
        "tools": {"npu": options},
        "rollout": rollout or {},
        "timeouts": {"finish_s": 300},
    }


async def run(root: Path, config: dict[str, Any], server: Any, engine: Any) -> Any:
    """Run three steps; return the manifests, and what is in the run's folder."""
    log = RequestLog()
    server.init_capture(config, engine=engine, replica=0, requests=log)
    callback = AsyncProfilingCallback(config)
    callback.add_rollout([server])
    await callback.on_train_begin()
    for step in (1, 2, 3):
        await callback.on_step_begin(step)
        await callback.on_rollout_begin()
        with log.open(prompt_tokens=3) as request:
            await engine.generate()
            request.response_tokens = ITERATIONS
        await callback.on_rollout_end()
        await callback.on_step_end()
    await callback.on_train_end()
    steps = [root / f"step_{step:06d}" for step in config["schedule"]["steps"]]
    return {
        "folders": [str(step) for step in steps],
        "manifests": [read_manifest(step) for step in steps],
        "left": sorted(path.name for path in root.iterdir()),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
