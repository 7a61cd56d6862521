"""A custom worker class on verl's single controller, profiled from a custom loop.

python -m recipes.custom_worker.score profiling=discrete
"""

from __future__ import annotations

from typing import Any

import hydra
import ray
import torch
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_profiling import ProfilingCallback, ProfilingConfig, stage
from verl_profiling.workers import CaptureMixin


class ScoringWorker(CaptureMixin, Worker):
    """verl's worker and the capture mixin; the stage is marked where the work is done."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)
        )
        self.init_capture(config, role="reward", rank=self.rank, world_size=self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @stage("reward")
    def score(self, samples: int) -> float:
        """Score random samples, two batches of them."""
        scores = []
        for _ in range(2):
            with stage("batch"), torch.no_grad():
                scores.append(self.model(torch.randn(samples, 64)).mean())
        return float(torch.stack(scores).mean())


@hydra.main(config_path=".", config_name="score", version_base=None)
def main(config: Any) -> None:
    """Score in a loop, and profile some of its steps."""
    settings = ProfilingConfig.from_any(config.profiling)
    if config.dry_run:
        print(f"config ok; {settings.mode} profile of reward in {settings.save_path}")
        return
    ray.init("local", num_cpus=config.workers, include_dashboard=False, log_to_driver=False)
    group = RayWorkerGroup(
        RayResourcePool([config.workers], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(ScoringWorker), config.profiling),
        device_name="cpu",
    )
    with ProfilingCallback(settings) as callback:
        callback.add_workers("reward", group)
        for step in range(1, config.steps + 1):
            callback.on_step_begin(step)
            with callback.stage("reward"):
                scores = group.score(config.samples)
            callback.on_step_end({"score": sum(scores) / len(scores)})
    ray.shutdown()
    print(f"step folders in {settings.save_path}")


if __name__ == "__main__":
    main()
