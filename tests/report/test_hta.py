"""On real GPU traces our figures are those of HolisticTraceAnalysis 0.5."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from verl_profiling.analysis import open_step

DATA = Path(__file__).parents[1] / "data"
STORED = json.loads((DATA / "hta.json").read_text())


def compare(trace: str, theirs: dict[str, float | None]) -> None:
    """Hold our row for a trace against HTA's figures, to 0.1 percentage points."""
    (row,) = open_step(DATA / trace).report().workers
    assert row.device
    assert 100 * row.idle_us / row.span_us == pytest.approx(theirs["idle_percent"], abs=0.1)
    assert 100 * row.compute_us / row.span_us == pytest.approx(theirs["compute_percent"], abs=0.1)
    if theirs["overlap_percent"] is None:
        assert row.communication_us == 0
    else:
        overlap = row.overlap_us / row.communication_us
        assert 100 * overlap == pytest.approx(theirs["overlap_percent"], abs=0.1)
    # In absolute terms as well: to a microsecond in a span of a second.
    assert row.span_us == pytest.approx(theirs["span_us"], abs=1.0)
    assert row.idle_us == pytest.approx(theirs["idle_us"], abs=1.0)
    assert row.compute_us == pytest.approx(theirs["compute_us"], abs=1.0)


@pytest.mark.parametrize("trace", STORED)
def test_figures_equal_those_that_hta_gave(trace: str) -> None:
    """Idle, compute and overlap agree with the stored figures (``make_hta.py`` wrote them)."""
    compare(trace, STORED[trace])


@pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="needs HolisticTraceAnalysis")
@pytest.mark.parametrize("trace", STORED)
def test_figures_equal_those_of_hta_now(trace: str) -> None:
    """The same against the HTA that is installed, so that the stored figures cannot go stale."""
    spec = importlib.util.spec_from_file_location("make_hta", DATA / "make_hta.py")
    make_hta = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_hta)
    compare(trace, make_hta.hta_figures(DATA / trace))
