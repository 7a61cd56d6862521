"""GRPO on Ray: ``python -m recipes.grpo_tiny.train``.

The loop itself is that of ``verl-profiling demo``, in ``verl_profiling/integrations/tiny_grpo.py``.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any, TextIO

import hydra
import ray
from omegaconf import DictConfig, OmegaConf

from recipes.grpo_tiny.rollout import RolloutServer
from recipes.grpo_tiny.workers import ActorWorker
from verl_profiling.integrations.tiny_grpo import Batch, GRPOLoop, Rows

Handles = list[Any]


def start_actors(config: DictConfig) -> Handles:
    """Start one FSDP2 worker per rank."""
    init_method = f"file://{tempfile.mkdtemp(prefix='grpo_tiny_')}/rendezvous"
    remote = ray.remote(num_cpus=1, num_gpus=config.gpus)(ActorWorker)
    return [remote.remote(config, rank, init_method) for rank in range(config.actor.world_size)]


def start_servers(config: DictConfig) -> Handles:
    """Start the rollout replicas and wait until all of them can serve."""
    remote = ray.remote(num_cpus=1, num_gpus=config.gpus)(RolloutServer)
    servers = [remote.remote(config, replica) for replica in range(config.rollout.replicas)]
    ray.get([server.start.remote() for server in servers])
    return servers


def call(actors: Handles, method: str, shares: list[Any]) -> list[Any]:
    """Call a method of each actor with its share; return the results."""
    calls = zip(actors, shares, strict=True)
    return ray.get([getattr(actor, method).remote(share) for actor, share in calls])


def spread(actors: Handles, method: str, items: list[Any]) -> list[Any]:
    """Share items out to actors, one call each; return the results in the items' order."""
    count = len(actors)
    results = [None] * len(items)
    shares = call(actors, method, [items[i::count] for i in range(count)])
    for i, share in enumerate(shares):
        results[i::count] = share
    return results


class RayLoop(GRPOLoop):
    """The loop with Ray actors; with a ``log``, it gets a line of metrics per step."""

    log: TextIO | None = None

    def __init__(self, config: DictConfig, actors: Handles, servers: Handles) -> None:
        super().__init__(config.profiling, actors, servers)
        self.config = config
        self.prompts = config.batch.prompts
        self.group_size = config.batch.group_size
        self.rng = random.Random(config.seed)

    def train(self, steps: int) -> None:
        """Train, and log into the output folder."""
        with Path(self.config.output_dir, "metrics.jsonl").open("w") as self.log:
            super().train(steps)

    def step(self, step: int) -> dict[str, float]:
        """Train on one batch; log and return the step's metrics."""
        return self.logged(step, super().step(step))

    def logged(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Write the metrics of a step into the log."""
        if self.log is not None:
            self.log.write(json.dumps({"step": step, **metrics}) + "\n")
        return metrics

    def generate(self, prompts: Rows) -> Rows:
        """Share the prompts out to the replicas."""
        return spread(self.servers, "generate", prompts)

    def on_all_ranks(self, method: str, batch: Batch) -> list[Any]:
        """Share the batch out to the ranks."""
        chunks = [tensor.chunk(len(self.actors)) for tensor in batch.values()]
        shares = [dict(zip(batch, share, strict=True)) for share in zip(*chunks, strict=True)]
        return call(self.actors, method, shares)

    def update_weights(self) -> None:
        """Send the weights from rank to replica; the controller does not see them."""
        weights = [actor.gather_weights.remote() for actor in self.actors]
        ray.get([server.load_weights.remote(weights[0]) for server in self.servers])


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Entry point: Hydra composes ``config.yaml`` with the command line."""
    ray.init(**OmegaConf.to_container(config.ray))
    try:
        RayLoop(config, start_actors(config), start_servers(config)).train(config.steps)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
