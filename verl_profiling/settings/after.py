"""What runs once a capture is written: the ``after`` group of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_profiling.errors import ConfigError
from verl_profiling.ranks import Ranks, parse_ranks
from verl_profiling.settings.typed_values import Seconds

__all__ = ["EVERY_RANK", "AfterHook"]

EVERY_RANK = "all"


@dataclass(frozen=True, kw_only=True)
class AfterHook:
    """A command that runs once a capture is written, in the background.

    Attributes:
        command: Program and arguments; no shell. Environment variables say what was written:
            ``VERL_PROFILING_FOLDER``, ``_RUN``, ``_STEP``, ``_ROLE``, ``_RANK`` and ``_PID``.
        when: ``capture``: after each capture. ``last``: once, after the last capture that the schedule has,
            or when training ends.
        roles: The roles whose processes run it. ``controller`` is the process of the loop, where all of a
            step is written; a worker runs it once its own artifacts are.
        ranks: Ranks of these roles, written like ``select.ranks``; ``all``, also those that do not record;
            ``None`` for those that record.
        timeout_s: Seconds after which the command and all it started are ended.
    """

    command: tuple[str, ...] = ()
    when: Literal["capture", "last"] = "capture"
    roles: tuple[str, ...] = ("controller",)
    ranks: Ranks = None
    timeout_s: Seconds = 600.0

    def __post_init__(self) -> None:
        if not self.command or "\0" in "".join(self.command):
            raise ConfigError("command", "is a program and its arguments, as a list")
        if not self.roles:
            raise ConfigError("roles", "is empty; leave it out for the controller")
        if self.ranks != EVERY_RANK:
            parse_ranks(self.ranks, "ranks")

    def runs_on(self, role: str, rank: int, records: bool) -> bool:
        """Return whether a process runs it that has this role and rank, and records or does not."""
        if role not in self.roles:
            return False
        if self.ranks is None or self.ranks == EVERY_RANK:
            return records or self.ranks is not None
        return rank in (parse_ranks(self.ranks, "ranks") or ())
