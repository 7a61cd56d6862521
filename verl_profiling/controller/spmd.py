"""One program on every rank: each process has a callback of its own, and all of them make one manifest.

Rank 0 leads: it decides where a step is recorded and writes the manifest. The others follow: they begin and
end the same steps, because the schedule decides from the step's number alone, drive their own workers,
and hand over what these recorded. Nobody waits for a rank longer than the timeouts say.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from verl_profiling import clock
from verl_profiling.controller.calls import Target
from verl_profiling.controller.channel import (
    Channel,
    StoreChannel,
    default_store,
    find_leader_files,
    lead_files,
)
from verl_profiling.controller.following_rank import Follower
from verl_profiling.controller.leading_rank import Leader
from verl_profiling.controller.peers import Alone
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.errors import ConfigError
from verl_profiling.ranks import process_rank
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["find_peers", "has_peers", "knows_peers", "leads"]

logger = logging.getLogger(__name__)

_joined: Counter[str] = Counter()


def find_peers(config: ProfilingConfig, targets: list[Target], folders: StepFolders) -> Alone:
    """Return how this callback works together with those of other processes.

    It has peers where the process is a rank of several, and drives nothing but objects of its own:
    one that drives Ray actors or worker groups is the only one, whatever its environment says.

    Raises:
        ConfigError: ``spmd: true``, and nothing says which rank this is.
    """
    if config.spmd and process_rank() is None:
        raise ConfigError(
            "spmd", "no rank: initialise torch.distributed, or set RANK and WORLD_SIZE as torchrun does"
        )
    place = _place(config, targets)
    if place is None:
        return Alone()
    rank, world_size = place
    store = default_store()
    if store is not None:
        _joined["store"] += 1
        channel: Channel = StoreChannel(store, f"verl_profiling/{_joined['store']}")
        join: Callable[[], Channel | None] = lambda: channel  # noqa: E731
    else:
        path, since_ns = config.local_folder, clock.now_ns()
        join = lambda: lead_files(path) if rank == 0 else find_leader_files(path, since_ns)  # noqa: E731
    logger.info("rank %d of %d: the ranks' callbacks record together", rank, world_size)
    return Leader(config, world_size, join, folders) if rank == 0 else Follower(config, rank, join)


def leads(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether this callback writes what a run has one of: it is alone, or rank 0.

    Before it has workers, only rank 0 of several does.
    """
    place = _place(config, targets) if knows_peers(config, targets) else process_rank()
    return place is None or place[0] == 0


def knows_peers(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether it is known yet if several callbacks record together: its workers may have to tell."""
    place = process_rank()
    return bool(targets) or config.spmd is not None or place is None or place[1] == 1


def has_peers(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether several callbacks record together."""
    return _place(config, targets) is not None


def _place(config: ProfilingConfig, targets: list[Target]) -> tuple[int, int] | None:
    """Return rank and world size where several callbacks record together, else ``None``."""
    place = process_rank()
    local = bool(targets) and all(target.is_local for target in targets)
    if config.spmd is False or place is None or place[1] == 1 or not (local or config.spmd):
        return None
    return place
