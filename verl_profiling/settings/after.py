"""What runs once a capture is written: the ``after`` group of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from string import Formatter
from typing import Literal

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.ranks import Ranks, parse_ranks
from verl_profiling.settings.typed_values import check_seconds

__all__ = ["EVERY_RANK", "PLACEHOLDERS", "AfterHook"]

PLACEHOLDERS = ("folder", "run", "step", "role", "rank", "pid")
"""What a command may name in braces."""
EVERY_RANK = "all"


@dataclass(frozen=True, kw_only=True)
class AfterHook:
    """A command or a function that runs once a capture is written, beside the training.

    Attributes:
        command: Program and arguments; no shell. ``folder``, ``run``, ``step``, ``role``, ``rank`` and
            ``pid`` in braces are replaced; a brace that is meant as such is written twice.
        environment: Further environment variables of the command, with the same placeholders.
        callable: ``"package.module:function"`` in place of a command; it is called in the process, on a
            thread, with a :class:`~verl_profiling.afterwards.hooks.HookEvent`.
        when: ``capture``: after each capture. ``last``: once, after the last capture that the schedule has,
            or when training ends.
        roles: The roles whose processes run it. ``controller`` is the process of the loop, where all of a
            step is written; a worker runs it once its own artifacts are.
        ranks: Ranks of these roles, written like ``select.ranks``; ``all``, also those that do not record;
            ``None`` for those that record.
        timeout_s: Seconds after which the command and all it started are ended; a function is no longer
            waited for then.
    """

    command: tuple[str, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    callable: str | None = None
    when: Literal["capture", "last"] = "capture"
    roles: tuple[str, ...] = ("controller",)
    ranks: Ranks = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.callable is None):
            raise ConfigError("command", "set either command or callable")
        if self.command is not None and not self.command:
            raise ConfigError("command", "is empty; write the program and its arguments as a list")
        for number, text in enumerate(self.command or ()):
            _check_template(f"command[{number}]", text)
        for name, text in self.environment.items():
            if not name or "=" in name or "\0" in name:
                raise ConfigError("environment", f"{name!r} is not the name of a variable")
            _check_template(f"environment.{name}", text)
        if not self.roles:
            raise ConfigError("roles", "is empty; leave it out for the controller")
        if self.ranks != EVERY_RANK:
            parse_ranks(self.ranks, "ranks")
        check_seconds("timeout_s", self.timeout_s)

    def runs_on(self, role: str, rank: int, records: bool) -> bool:
        """Return whether a process runs it that has this role and rank, and records or does not."""
        if role not in self.roles:
            return False
        if self.ranks is None or self.ranks == EVERY_RANK:
            return records or self.ranks is not None
        return rank in (parse_ranks(self.ranks, "ranks") or ())

    def check_callable(self, key: str) -> None:
        """Import what ``callable`` names.

        Raises:
            ConfigError: It cannot be imported, or called.
        """
        if self.callable is not None:
            module, separator, name = self.callable.partition(":")
            try:
                found = getattr(import_module(module), name) if separator else None
            except Exception as error:  # importing a module may raise anything
                raise ConfigError(key, f"{self.callable!r} cannot be imported: {error}") from error
            if not callable(found):
                raise ConfigError(
                    key, f"{self.callable!r} is not a function; write 'package.module:function'"
                )


def _check_template(key: str, text: str) -> None:
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(key, f"{text!r}: {error}; write a brace that is meant as such twice") from None
    if "\0" in text:
        raise ConfigError(key, "holds a NUL character")
    for _, name, format_spec, conversion in parts:
        if name is None:
            continue
        if name not in PLACEHOLDERS or format_spec or conversion:
            hint = f"{choices_hint(name, PLACEHOLDERS)}, or write braces twice"
            raise ConfigError(key, f"unknown placeholder in {text!r}; {hint}")
