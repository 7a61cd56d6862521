"""Colours of stages and causes, as classes of ``page/page.css``.

Known stages have the first classes ``s0``, ``s1``, ..., in order of the list. The next ones are
shared by stages and causes with other names. If the list grows, the file needs as many more
classes.
"""

from __future__ import annotations

from collections.abc import Collection
from zlib import crc32

_STAGES = (
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
_OTHERS = 6  # colours of other names
_CAUSE_KEYS = {
    "decode": "s0",
    "generate": "s0",
    "prefill": "s3",
    "first token": "s3",
    "queued": "s4",
    "to the engine": "s2",
    "from the engine": "s2",
    "reward": "s1",
    "environment": "s8",
    "sandbox": "s8",
    "wait": "s5",
    "controller": "s6",
    "own code": "s9",
    "loop lag": "k-host_blocked",
    "requests of no trajectory": "s3",
    "no trajectory": "rest",
    "began before the capture": "k-unexplained",
    "unexplained": "k-unexplained",
}


def stage_class(name: str) -> str:
    """Return the class of ``page.css`` for the colour of a stage,
    which depends only on the stage's name.
    """
    if name.startswith("("):  # no stage: ``(in no stage)``
        return "rest"
    if name in _STAGES:
        return f"s{_STAGES.index(name)}"
    return _other(name)


def cause_key(cause: str) -> str:
    """Return the class of ``page.css`` for the colour of a cause: of its name, else of the part
    before ``:``.
    """
    return _CAUSE_KEYS.get(cause) or _CAUSE_KEYS.get(cause.partition(":")[0]) or _other(cause)


def _other(name: str) -> str:
    return f"s{len(_STAGES) + crc32(name.encode()) % _OTHERS}"


def colour_of(name: str, stages: Collection[str]) -> str:
    """Return the class of a stage, or of a cause if the name is not one of the stages."""
    if name in stages:
        return stage_class(name)
    return cause_key(name)
