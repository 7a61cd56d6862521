"""The trained model: one process per FSDP2 rank."""

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.grpo_tiny.model import build_model
from recipes.grpo_tiny.task import PROMPT_LENGTH
from verl_profiling import stage
from verl_profiling.workers import FSDPCaptureMixin


class ActorWorker(FSDPCaptureMixin):
    """One rank of the policy. The mixin adds what the profiling callback calls."""

    def __init__(self, config: DictConfig, rank: int, init_method: str) -> None:
        self.config = config.actor
        world_size = self.config.world_size
        self.device = (
            "cuda" if config.gpus else "cpu"
        )  # Ray shows each actor its GPU as the only one
        backend = "nccl" if config.gpus else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
        mesh = init_device_mesh(self.device, (world_size,), mesh_dim_names=("dp",))
        self.model = build_model(config.model, config.seed).to(self.device)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.lr, weight_decay=0.0
        )
        self.init_capture(config.profiling, role="actor", mesh=mesh)

    @stage("old_log_prob")
    def old_log_prob(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each response token under the weights as they are."""
        with torch.no_grad():
            return self._log_prob(batch["tokens"].to(self.device)).cpu()

    @stage("update_actor")
    def update_actor(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on this rank's share of the batch, one mini-batch after the other;
        return the mean loss.
        """
        losses = []
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        for rows in torch.randperm(len(batch["tokens"])).chunk(self.config.mini_batches):
            with stage("mini_batch"):
                loss = self._policy_loss({name: tensor[rows] for name, tensor in batch.items()})
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
            self.capture.step()
        return sum(losses) / len(losses)

    @stage("update_weights")
    def gather_weights(self) -> dict[str, torch.Tensor]:
        """Return the whole state; every rank has to take part."""
        return {
            name: weight.full_tensor().cpu() for name, weight in self.model.state_dict().items()
        }

    def _log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, PROMPT_LENGTH - 1 : -1]
        responses = tokens[:, PROMPT_LENGTH:, None]
        return logits.log_softmax(-1).gather(-1, responses).squeeze(-1)

    def _policy_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ratio = (self._log_prob(batch["tokens"]) - batch["old_log_prob"]).exp()
        advantage = batch["advantage"][:, None]
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        per_token = -torch.minimum(ratio * advantage, clipped * advantage) * batch["mask"]
        return (per_token.sum(1) / batch["mask"].sum(1)).mean()
