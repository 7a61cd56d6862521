"""The colours of stages: the same on every page and in both themes, whatever else a step holds."""

from __future__ import annotations

from zlib import crc32

__all__ = ["stage_class", "stage_colour"]

_NAMED = (
    "rollout",
    "reward",
    "old_log_prob",
    "ref_log_prob",
    "values",
    "advantage",
    "update_critic",
    "update_actor",
    "update_weights",
    "validate",
)
_OTHERS = 6


def stage_colour(name: str) -> int:
    """Return the number of a stage's colour, the ``s<number>`` of ``page.css``; only its name decides."""
    if name in _NAMED:
        return _NAMED.index(name)
    return len(_NAMED) + crc32(name.encode()) % _OTHERS


def stage_class(name: str) -> str:
    """Return the class of ``page.css`` that colours a stage, or what is none: ``(in no stage)``."""
    return "rest" if name.startswith("(") else f"s{stage_colour(name)}"
