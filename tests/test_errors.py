"""The errors: what can be caught, and what their messages carry."""

from __future__ import annotations

import pickle

import pytest

from verl_profiling import (
    CaptureStateError,
    ConfigError,
    ProfilingError,
    ToolUnavailableError,
    TraceFormatError,
)
from verl_profiling.errors import choices_hint


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (ConfigError("a.b", "is wrong"), ValueError),
        (CaptureStateError("state"), RuntimeError),
        (ToolUnavailableError("tool"), RuntimeError),
        (TraceFormatError("x.json", "is cut off"), ValueError),
    ],
)
def test_every_error_is_ours_and_a_standard_one(error: Exception, standard: type[Exception]) -> None:
    """One base class catches all, and code that knows only the standard ones works too."""
    assert isinstance(error, ProfilingError)
    assert isinstance(error, standard)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a.b", "is wrong"),
        TraceFormatError("x.json", "is cut off", 12),
        TraceFormatError("x.json", "is cut off"),
        CaptureStateError("state"),
        ToolUnavailableError("tool"),
    ],
)
def test_errors_travel_between_processes(error: Exception) -> None:
    """Ray pickles what a worker raises; nothing of it is lost."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_hint_guesses_only_what_is_close() -> None:
    """A near miss is named; all choices are listed in any case."""
    assert choices_hint("stak", ["shapes", "stack"]) == "did you mean 'stack'? choose from: shapes, stack"
    assert choices_hint("zzz", ["shapes", "stack"]) == "choose from: shapes, stack"
    assert choices_hint(3, ["stack"]) == "choose from: stack"
