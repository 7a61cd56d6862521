"""The trained model: one process per FSDP2 rank."""

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.grpo_tiny.model import build_model
from verl_profiling import stage
from verl_profiling.integrations.tiny_grpo import Batch, PolicyWorker
from verl_profiling.workers import FSDPCaptureMixin


class ActorWorker(FSDPCaptureMixin, PolicyWorker):
    """One rank of the policy. The mixin adds what the profiling callback calls."""

    def __init__(self, config: DictConfig, rank: int, init_method: str) -> None:
        self.mini_batches = config.actor.mini_batches
        world_size = config.actor.world_size
        # Ray shows each actor its GPU as the only one
        self.device = "cuda" if config.gpus else "cpu"
        backend = "nccl" if config.gpus else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
        mesh = init_device_mesh(self.device, (world_size,), mesh_dim_names=("dp",))
        self.model = build_model(config.model, config.seed).to(self.device)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.actor.lr, weight_decay=0.0
        )
        self.init_capture(config.profiling, role="actor", mesh=mesh)

    def policy(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def old_log_prob(self, batch: Batch) -> torch.Tensor:
        """Compute on the device."""
        return super().old_log_prob(self._on_device(batch)).cpu()

    def update_actor(self, batch: Batch) -> None:
        """Train on the device."""
        super().update_actor(self._on_device(batch))

    @stage("update_weights")
    def gather_weights(self) -> Batch:
        """Return the whole state; every rank has to take part."""
        return {
            name: weight.full_tensor().cpu() for name, weight in self.model.state_dict().items()
        }

    def _on_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}
