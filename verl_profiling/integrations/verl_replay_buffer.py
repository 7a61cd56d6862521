"""What verl's V1 trainer does during a rollout, as stages, and what it throws away of one.

Agent loops put responses into TransferQueue, and the trainer looks there every two seconds. So a rollout
ends some time after its last trajectory has; these stages say what with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from verl_profiling.integrations.verl_profiler import say_fates, trainer_stage
from verl_profiling.integrations.wrapping import around, wrap
from verl_profiling.manifest import POLLING

__all__ = ["hook_dispatch", "hook_replay_buffer"]


def hook_dispatch(module: Any) -> None:
    """Mark how long the prompts take to the agent loops."""
    wrap(module.AgentLoopManagerTQ, "generate_sequences", _marked("dispatch_prompts"))


def hook_replay_buffer(module: Any) -> None:
    """Mark the pause until the trainer looks for responses again, and say which ones it throws away."""
    buffer = module.ReplayBuffer
    wrap(buffer, "_wait_for_next_poll", _marked(POLLING))
    wrap(buffer, "_clear_groups", _abandoning)
    wrap(buffer, "_evict_terminal_groups", _evicting)


def _marked(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return around(partial(trainer_stage, name))


def _abandoning(clear_groups: Callable[..., Any]) -> Callable[..., Any]:
    """Say that trajectories are not trained on: left over, or of a group in which another one failed."""

    def clear(self: Any, partition_id: str, uids: Iterable[str], *args: Any, **kwargs: Any) -> Any:
        say_fates(lambda: _responses(self.partitions[partition_id], set(uids)))
        return clear_groups(self, partition_id, uids, *args, **kwargs)

    return clear


def _responses(keys: Iterable[str], groups: set[str]) -> list[tuple[str, int | None, str]]:
    """Return the trajectories of some groups that gave a response; a key is ``group_sample_output``."""
    split = (key.split("_") for key in keys)
    samples = dict.fromkeys((parts[0], int(parts[1])) for parts in split if parts[0] in groups)
    return [(group, sample, "abandoned") for group, sample in samples]


def _evicting(evict: Callable[..., Any]) -> Callable[..., Any]:
    """Say why: a group took too many steps, or its rewards are all the same."""

    def evict_groups(
        self: Any, global_steps: int, partition_id: str, eviction_reasons: Any, *args: Any, **kwargs: Any
    ) -> Any:
        evicted = evict(self, global_steps, partition_id, eviction_reasons, *args, **kwargs)
        say_fates(
            lambda: [
                (group, None, fate)
                for fate, groups in zip(("stale", "filtered"), eviction_reasons, strict=False)
                for group in groups
            ]
        )
        return evicted

    return evict_groups
