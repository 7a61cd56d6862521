"""The recipe with a slow rank in one step: ``python -m tests.recipes.slow_rank
SLOW_STEP OVERRIDES...``.
"""

import sys
import time

import torch
import torch.distributed as dist

from recipes.grpo_tiny import train
from recipes.grpo_tiny.workers import ActorWorker

SLOW_STEP = int(sys.argv.pop(1))
SLEEP_S = 1.0


class SlowActor(ActorWorker):
    """Rank 1 sleeps before each mini-batch of one step."""

    steps = 0

    def update_actor(self, batch: dict[str, torch.Tensor]) -> None:
        self.steps += 1
        super().update_actor(batch)

    def _policy_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.steps == SLOW_STEP and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return super()._policy_loss(batch)


if __name__ == "__main__":
    train.ActorWorker = SlowActor
    train.main()
