"""Holds recorded stages against verl's ``timing_s/*``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.manifest import Manifest, StageSpan

PREFIX = "timing_s/"
STAGES = {"adv": "advantage", "ref": "ref_log_prob", "testing": "validate", "gen": "rollout"}
CLOSE_S = 0.001


@dataclass(frozen=True)
class Compared:
    """One timer of verl's and what is recorded of it, in one step.

    Attributes:
        step: The step.
        timer: verl's name.
        theirs_s: What verl measured.
        ours_s: How long the stages of the controller took together, or the step.
    """

    step: int
    timer: str
    theirs_s: float
    ours_s: float

    @property
    def difference_s(self) -> float:
        """How much longer the recorded stages took."""
        return self.ours_s - self.theirs_s


def compared(manifest: Manifest) -> Iterator[Compared]:
    """Yield every timer of verl's that is a stage, for each step of a capture."""
    for step in manifest.step_spans:
        metrics = step.metrics if len(manifest.steps) > 1 else manifest.metrics
        later = [other.begin_ns for other in manifest.step_spans if other.begin_ns > step.begin_ns]
        until_ns = min(later, default=None)
        spans = [
            span
            for span in (*manifest.stages, *manifest.outside)
            if step.begin_ns <= span.begin_ns and (until_ns is None or span.begin_ns < until_ns)
        ]
        for name, value in metrics.items():
            timer = name.removeprefix(PREFIX)
            if timer == name or "/" in timer:
                continue
            if timer == "step":
                yield Compared(step.step, timer, value, (step.end_ns - step.begin_ns) / 1e9)
            elif durations := _durations(spans, STAGES.get(timer, timer)):
                yield Compared(step.step, timer, value, sum(durations))


def _durations(spans: Iterable[StageSpan], name: str) -> list[float]:
    """Return how long the stages of a name took, in seconds."""
    return [(span.end_ns - span.begin_ns) / 1e9 for span in spans if span.name == name]


def folders(path: Path) -> list[Path]:
    """Return the step folders of a run."""
    return sorted(path.glob("step_*"))


def largest(found: Iterable[Compared]) -> Mapping[str, Compared]:
    """Return the largest difference of each timer."""
    by_timer: dict[str, Compared] = {}
    for one in found:
        if one.timer not in by_timer or abs(one.difference_s) > abs(by_timer[one.timer].difference_s):
            by_timer[one.timer] = one
    return by_timer
