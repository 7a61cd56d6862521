"""Ranks as users write them: ``"0,8-15"``, a number, a list, or a word; and the rank a launcher gave."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from verl_profiling.errors import ConfigError

Ranks = str | int | tuple[int, ...] | None

_MOST_RANKS = 1 << 20


def coordinates_in(value: Ranks, key: str) -> frozenset[int] | None:
    """Parse like :func:`parse_ranks`, but numbers and lists may be negative, counting from the end."""
    if value is None or isinstance(value, str):
        return parse_ranks(value, key)
    listed = (value,) if isinstance(value, int) else value
    parse_ranks(tuple(map(abs, listed)), key)
    return frozenset(listed)


def parse_ranks(value: Ranks, key: str) -> frozenset[int] | None:
    """Return the ranks in ``"0,8-15"``, ``3`` or ``[0, 1]``; ``None`` stays ``None``.

    Raises:
        ConfigError: The value is none of these.
    """
    if value is None:
        return None
    if isinstance(value, int):
        value = (value,)
    if isinstance(value, str):
        value = tuple(_ranks_in(value, key))
    if not value:
        raise ConfigError(key, 'selects nothing; leave it out to select all, or write e.g. "0,8-15"')
    if min(value) < 0:
        raise ConfigError(key, f"rank {min(value)} is negative")
    return frozenset(value)


def _ranks_in(text: str, key: str) -> Iterator[int]:
    room = _MOST_RANKS
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ConfigError(key, f'{text!r} is not a list of ranks; write e.g. "0,8-15"') from None
        room -= high - low + 1
        if high < low or room < 0:
            raise ConfigError(key, f'{part.strip()!r} is not a range of ranks; write e.g. "8-15"')
        yield from range(low, high + 1)


def process_rank() -> tuple[int, int] | None:
    """Return rank and world size of this process, or ``None`` where nothing says so.

    ``torch.distributed`` knows them once it is initialised; else the launcher's RANK and WORLD_SIZE do.
    It imports no torch.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, world_size) if 0 <= rank < world_size else None
