"""One program on every rank, no Ray: ``torchrun --nproc-per-node 2 -m recipes.spmd_tiny.train``."""

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import FSDPCaptureMixin


class Actor(FSDPCaptureMixin):
    """A policy that learns which of its actions is paid for; one replica of it is on every rank."""

    def __init__(self, config: DictConfig) -> None:
        torch.manual_seed(config.seed)
        self.policy = DistributedDataParallel(
            torch.nn.Linear(config.actions, config.actions, bias=False)
        )
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=config.lr)
        self.generator = torch.Generator().manual_seed(config.seed + dist.get_rank())
        self.config = config
        self.init_capture(config.profiling, role="actor")

    @stage("rollout")
    def rollout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample an action for each of a batch of states."""
        states = torch.randint(self.config.actions, (self.config.batch,), generator=self.generator)
        with torch.no_grad():
            probabilities = self.policy(self._inputs(states)).softmax(-1)
        return states, torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)

    @stage("update_actor")
    def update(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """REINFORCE; the gradients of all ranks are averaged."""
        log_prob = (
            self.policy(self._inputs(states)).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        )
        self.optimizer.zero_grad()
        (-log_prob * (rewards - rewards.mean()) * self.config.actions).mean().backward()
        self.optimizer.step()

    def _inputs(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(states, self.config.actions).float()


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Run the loop on this rank."""
    dist.init_process_group("gloo")
    actor = Actor(config)
    profiling = ProfilingCallback(config.profiling)
    profiling.add_workers("actor", actor)
    with profiling:
        for step in range(1, config.steps + 1):
            profiling.on_step_begin(step)
            states, actions = actor.rollout()
            with profiling.stage("reward"):
                rewards = (actions == (states + 1) % config.actions).float()
            actor.update(states, actions, rewards)
            reward = rewards.mean()
            dist.all_reduce(reward)
            profiling.on_step_end({"reward": float(reward) / dist.get_world_size()})
            if dist.get_rank() == 0:
                print(
                    f"step {step}  reward {float(reward) / dist.get_world_size():.3f}", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
