"""A program: verl's real SGLang server with the capture methods, on a stand-in for SGLang.

SGLang and verl do not share an environment on CPU, so every module of ``sglang`` is a stand-in
here, whose tokenizer manager writes one trace. The server class is verl's, built and launched as
verl does. Prints what was captured.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib.abc
import importlib.machinery
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import msgspec

TRACE = b'{"traceEvents": [{"ph": "X", "name": "forward", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}'


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of SGLang, with whatever name is asked of it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        module.__version__ = "0.5.12"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""


@dataclass
class ServerArgs:
    """Takes whatever the server passes; verl asks for its fields."""

    enable_metrics: bool = False

    def __init__(self, **given: Any) -> None:
        self.given = given


class Manager:
    """What the server drives: requests, and a profiler that writes where it is told."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(tp_size=1, pp_size=1, dp_size=1, device="cpu")
        self.event_loop = None
        self._folder = Path()

    async def start_profile(
        self,
        output_dir: str,
        activities: list[str],
        with_stack: bool,
        record_shapes: bool,
        profile_prefix: str = "",
    ) -> None:
        self._folder, self._prefix = Path(output_dir), profile_prefix

    async def stop_profile(self) -> None:
        (self._folder / f"{self._prefix}-1.0-TP-0.trace.json.gz").write_bytes(gzip.compress(TRACE))

    async def generate_request(self, request: Any, raw: Any) -> AsyncIterator[dict[str, Any]]:
        meta = {"prompt_tokens": 4, "completion_tokens": 2, "finish_reason": {"type": "stop"}}
        yield {"output_ids": [1, 2], "meta_info": meta}


def launch(**arguments: Any) -> tuple[Manager, None, dict[str, Any]]:
    """Return what SGLang returns when it has started its processes."""
    return Manager(), None, {}


async def main(folder: Path, assets: Path) -> None:
    """Build and launch a server, tell it of new weights, and capture one request."""
    sys.meta_path.insert(0, StandIn())
    from hydra import compose, initialize_config_module
    from omegaconf import open_dict
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.sglang_rollout import async_sglang_server as module

    from verl_profiling import ProfilingConfig
    from verl_profiling.integrations.verl_servers import SETTINGS_KEY
    from verl_profiling.messages import CaptureRequest

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            ["actor_rollout_ref.rollout.name=sglang", f"actor_rollout_ref.model.path={assets}/model"],
        ).actor_rollout_ref
    settings = ProfilingConfig(enable=True, save_path=str(folder))
    with open_dict(config):
        config.rollout.engine_kwargs = {SETTINGS_KEY: settings.to_dict()}

    module.ServerArgs = ServerArgs
    sys.modules["sglang.srt.entrypoints.http_server"].Engine._launch_subprocesses = launch
    module.run_uvicorn = AsyncMock(return_value=(1, None))
    server: Any = module.SGLangHttpServer(
        config.rollout,
        config.model,
        RolloutMode.HYBRID,
        workers=[],
        replica_rank=3,
        node_rank=0,
        nnodes=1,
        cuda_visible_devices="",
        base_gpu_id=0,
    )
    await server.launch_server()
    await server.set_global_steps(6)
    request = CaptureRequest(
        capture_id="one", run_id="run", step=7, policy_version=6, folder=str(folder / "step_000007")
    )
    started = await server.start_capture(request)
    output = await server.generate([5, 6, 7, 8], {"max_new_tokens": 2}, "request")
    await server.set_global_steps(7)
    stopped = await server.stop_capture("one", 30.0)
    answer = {"started": started, "result": stopped.result, "tokens": list(output.token_ids)}
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
