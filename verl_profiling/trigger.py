"""Who asked for a capture, and why: part of its manifest."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Sign", "Trigger", "TriggerKind"]

TriggerKind = Literal["schedule", "demand", "anomaly"]
Sign = Literal["", "slow_step", "slow_stage", "leader", "memory"]
"""What the watch noticed: as the settings ``watch.trigger`` name it."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """What asked for a capture.

    Attributes:
        kind: ``schedule``: the settings. ``demand``: a person, while the run went on. ``anomaly``: the watch.
        reason: Why, as a sentence; on demand, what was asked for.
        by: Who asked on demand, e.g. ``root@node1``, or ``SIGUSR2``.
        request: Id of the request on demand.
        sign: What the watch noticed.
        noticed: The step that it noticed.
        stage: The stage that was slow, if one was; on demand, the only one that was asked for.
        suspects: Lanes of the processes that may be the cause, e.g. ``actor_rank3``; the likeliest first.
        peers: Lanes of processes of the same role that are captured to compare them with.
        value: What the step that was noticed had: seconds, a share of the step, or bytes.
        median: What the steps before it had, in the same unit.
        history: The values of these steps and of the one that was noticed, in order.
    """

    kind: TriggerKind = "schedule"
    reason: str = ""
    by: str = ""
    request: str = ""
    sign: Sign = ""
    noticed: int | None = None
    stage: str = ""
    suspects: list[str] = []
    peers: list[str] = []
    value: float = 0.0
    median: float = 0.0
    history: list[float] = []

    def in_words(self) -> str:
        """Return why, with who asked on demand."""
        who = f"asked for by {self.by}: " if self.by else ""
        return f"{who}{self.reason}"
