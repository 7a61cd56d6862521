"""The exceptions that users can catch. Every message gives state, identity and remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CaptureStateError",
    "ConfigError",
    "ProfilingError",
    "ToolUnavailableError",
    "TraceFormatError",
    "choices_hint",
]


class ProfilingError(Exception):
    """Base class of all exceptions of ``verl_profiling``."""


class ConfigError(ProfilingError, ValueError):
    """A configuration value is wrong.

    Attributes:
        key: Dotted key of the offending value, e.g. ``tools.torch.stack``.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key = key
        self.problem = problem

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), (self.key, self.problem)


class CaptureStateError(ProfilingError, RuntimeError):
    """A capture method was called in a state that does not allow it."""


class ToolUnavailableError(ProfilingError, RuntimeError):
    """A tool or an engine does not work on this machine; the message has the remedy."""


class TraceFormatError(ProfilingError, ValueError):
    """A trace or a manifest cannot be read.

    Attributes:
        path: The file.
        offset: Byte offset (in the uncompressed content) at which reading failed, if known.
    """

    def __init__(
        self, path: str | os.PathLike[str], problem: str, offset: int | None = None
    ) -> None:
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{os.fspath(path)}{where}: {problem}")
        self.path = os.fspath(path)
        self.problem = problem
        self.offset = offset

    def __reduce__(self) -> tuple[type[TraceFormatError], tuple[str, str, int | None]]:
        return type(self), (self.path, self.problem, self.offset)


def choices_hint(value: object, choices: Iterable[str]) -> str:
    """Return ``did you mean 'x'? choose from: a, b, x`` for an unknown name."""
    names = sorted(choices)
    close = get_close_matches(str(value), names, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}choose from: {', '.join(names)}"
