"""Ranks as users write them: ``"0,8-15"``, a number, or a list."""

from __future__ import annotations

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
