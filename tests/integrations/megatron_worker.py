"""A program: verl's real worker around its real Megatron engine class, captured on one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from omegaconf import OmegaConf
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngine
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipes.megatron_tiny.model import build_model
from verl_profiling import ProfilingConfig
from verl_profiling.capture.protocol import CaptureStart

MICRO_BATCHES, LENGTH = 3, 16


class OnCpu(torch.overrides.TorchFunctionMode):
    """Puts the one scalar that the schedule makes on the GPU on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        placed = {**(kwargs or {})}
        if placed.get("device") == "cuda":
            placed["device"] = "cpu"
        return func(*args, **placed)


def engine_around(model: torch.nn.Module) -> MegatronEngine:
    """Return verl's engine with a model that it did not build."""
    engine: MegatronEngine = object.__new__(MegatronEngine)
    engine.engine_config = McoreEngineConfig()
    engine.module = [model]
    return engine


def train(engine: MegatronEngine) -> None:
    tokens = torch.arange(LENGTH + 1).repeat(2, 1)
    positions = torch.arange(LENGTH).expand(2, LENGTH)

    def forward(batches: Iterator[torch.Tensor], part: Any) -> Any:
        batch = next(batches)
        inputs, labels = batch[:, :-1], batch[:, 1:]
        output = part(input_ids=inputs, position_ids=positions, attention_mask=None, labels=labels)
        return output, lambda losses: (losses.mean(), {})

    with OnCpu():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([tokens] * MICRO_BATCHES),
            model=engine.module,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )


def main(folder: Path) -> None:
    """Capture one update, and print the worker's answer."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    config = OmegaConf.load("recipes/megatron_tiny/config.yaml")
    config.parallel = {"tp": 1, "pp": 1}
    engine = engine_around(build_model(config))
    worker: Any = object.__new__(ActorRolloutRefWorker)
    worker.actor, worker.ref = SimpleNamespace(engine=engine), None
    worker.actor.train_mini_batch = lambda data: train(engine)
    worker.enable_routing_replay = False
    worker.init_capture(ProfilingConfig(enable=True, tool="torch"), "actor")
    request = CaptureStart(capture_id="one", run_id="run", step=1, folder=str(folder / "step"))
    reply = worker.start_capture(request)
    worker.update_actor(None)
    stopped = worker.stop_capture("one", 30.0)
    print(msgspec.json.encode({"identity": reply.identity, "result": stopped.result}).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
