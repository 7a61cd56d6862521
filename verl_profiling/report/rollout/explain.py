"""What went on in a stretch of the rollout: the trajectories', else the processes', else the loop's doing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from verl_profiling.manifest import StageSpan
from verl_profiling.report.intervals import EMPTY, Spans, length, spans_of, subtract, union
from verl_profiling.report.rollout.axes import Ints, Sharing
from verl_profiling.report.rollout.calls import OTHERS
from verl_profiling.report.rollout.pieces import UNEXPLAINED, Pieces

__all__ = ["NO_TRAJECTORY", "Explanation", "few_causes"]

_MOST_CAUSES = 20

NO_TRAJECTORY = "requests of no trajectory"


class Explanation:
    """Says of any time what went on.

    An instant is divided equally among all that trajectories wait for then. Where none runs, it belongs to
    the spans of processes outside of trajectories; else to the controller's innermost stage inside the
    rollout; else to the engines, if a request is on its way; else it is unexplained.

    Args:
        trajectories: What trajectories waited for.
        processes: What processes did outside of trajectories.
        stages: The controller's stages.
        requests: When requests were on their way.
    """

    def __init__(
        self, trajectories: Pieces, processes: Pieces, stages: Sequence[StageSpan], requests: Spans
    ) -> None:
        inner = dict(_inner_stages(stages))
        self._names = [*trajectories.causes, *(f"controller: {name}" for name in inner), NO_TRAJECTORY]
        self._levels: list[tuple[Ints, Sharing]] = []
        taken = EMPTY
        for pieces in (trajectories, processes):
            self._levels.append((pieces.cause, _sharing(pieces.begin, pieces.end, taken)))
            taken = union(taken, np.stack((pieces.begin, pieces.end), axis=1))
        for number, spans in enumerate((*inner.values(), requests), start=len(trajectories.causes)):
            left = subtract(spans, taken)
            cause = np.full(len(left), number, dtype=np.int64)
            self._levels.append((cause, _sharing(left[:, 0], left[:, 1], EMPTY)))
            taken = union(taken, left)

    def of(self, window: Spans) -> dict[str, float]:
        """Return seconds by cause, the largest first and what is unexplained last; they add up to the window.

        Args:
            window: The time; an instant in several of its spans counts as often.
        """
        took = sum(
            (
                np.bincount(cause, weights=sharing.shares(window), minlength=len(self._names))
                for cause, sharing in self._levels
            ),
            start=np.zeros(len(self._names)),
        )
        found = dict(zip(self._names, (took / 1e9).tolist(), strict=True))
        whole = length(window) / 1e9
        named = sum(seconds for name, seconds in found.items() if name != UNEXPLAINED)
        return _ordered({**found, UNEXPLAINED: max(whole - named, 0.0)})


def _ordered(seconds: dict[str, float]) -> dict[str, float]:
    order = sorted(seconds, key=lambda name: (name == UNEXPLAINED, -seconds[name]))
    return {name: seconds[name] for name in order if seconds[name] > 0}


def few_causes(seconds: dict[str, float]) -> dict[str, float]:
    """Return the causes with most time; the others are one, before what is unexplained."""
    named = [name for name in seconds if name != UNEXPLAINED]
    few = {name: seconds[name] for name in named[:_MOST_CAUSES]}
    if rest := named[_MOST_CAUSES:]:
        few[OTHERS] = sum(seconds[name] for name in rest)
    return few | {name: took for name, took in seconds.items() if name == UNEXPLAINED}


def _sharing(begin: Ints, end: Ints, hidden: Spans) -> Sharing:
    return Sharing(np.zeros(len(begin), dtype=np.int64), begin, end, hidden)


def _inner_stages(stages: Sequence[StageSpan]) -> Iterator[tuple[str, Spans]]:
    """Yield the time of the controller's stages inside others, those that are deepest first."""
    runs: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for span in stages:
        if span.depth:
            runs.setdefault((-span.depth, span.name), []).append((span.begin_ns, span.end_ns))
    by_name: dict[str, Spans] = {}
    for (_, name), spans in sorted(runs.items()):
        by_name[name] = union(by_name.get(name, EMPTY), spans_of(spans))
    yield from by_name.items()
