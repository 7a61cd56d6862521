"""The colours of stages and causes: the same on every page and in both themes, whatever else a step holds."""

from __future__ import annotations

from zlib import crc32

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
_CAUSES = {
    "decode": "s0",
    "generate": "s0",
    "prefill": "s3",
    "first token": "s3",
    "queued": "s4",
    "to the engine": "s2",
    "from the engine": "s2",
    "reward": "s1",
    "environment": "s8",
    "wait": "s5",
    "controller": "s6",
    "own code": "s9",
    "loop lag": "k-host_blocked",
    "requests of no trajectory": "s3",
    "no trajectory": "rest",
    "began before the capture": "k-unexplained",
    "unexplained": "k-unexplained",
}


def stage_colour(name: str) -> int:
    """Return the number of a stage's colour, the ``s<number>`` of ``page.css``; only its name decides."""
    if name in _NAMED:
        return _NAMED.index(name)
    return len(_NAMED) + crc32(name.encode()) % _OTHERS


def stage_class(name: str) -> str:
    """Return the class of ``page.css`` that colours a stage, or what is none: ``(in no stage)``."""
    return "rest" if name.startswith("(") else f"s{stage_colour(name)}"


def cause_key(cause: str) -> str:
    """Return the class of ``page.css`` that colours a cause: its own, its family's, or one of its name."""
    other = f"s{len(_NAMED) + crc32(cause.encode()) % _OTHERS}"
    return _CAUSES.get(cause) or _CAUSES.get(cause.partition(":")[0]) or other
