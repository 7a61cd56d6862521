"""A sampler for verl whose batches have an order that only their content decides.

verl trains on samples in the order in which they were finished, which differs from run to run, and
with it the last bits of every sum. With this one, two runs that generate the same compute the same.
"""

from __future__ import annotations

from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedReplayBuffer(ReplayBuffer):
    """verl's own, but for the order."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return a batch sorted by its tokens, and verl's numbers about it."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        tokens = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=partition_id, select_fields=["prompts", "responses"]
        )
        content = [
            (prompt.tolist(), response.tolist())
            for prompt, response in zip(tokens["prompts"].unbind(), tokens["responses"].unbind(), strict=True)
        ]
        order = sorted(range(len(content)), key=content.__getitem__)
        batch.keys = [batch.keys[index] for index in order]
        batch.tags = [batch.tags[index] for index in order]
        return batch, metrics
