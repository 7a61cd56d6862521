"""The errors: what can be caught, and that they travel between processes."""

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


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (ConfigError("a.b", "is wrong"), ValueError),
        (CaptureStateError("state"), RuntimeError),
        (ToolUnavailableError("tool"), RuntimeError),
        (TraceFormatError("x.json", "is cut off"), ValueError),
        (TraceFormatError("x.json", "is cut off", 12), ValueError),
    ],
)
def test_every_error_is_ours_and_a_standard_one(error: Exception, standard: type[Exception]) -> None:
    """One base class catches all; Ray pickles what a worker raises, and nothing of it is lost."""
    assert isinstance(error, ProfilingError)
    assert isinstance(error, standard)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
