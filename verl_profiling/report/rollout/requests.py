"""Divides ``generate`` spans by the parts of the requests that they waited for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.report.rollout.axes import Ints

__all__ = ["FROM_THE_ENGINE", "PARTS", "TO_THE_ENGINE", "divided_requests"]

TO_THE_ENGINE, FROM_THE_ENGINE = "to the engine", "from the engine"
PARTS = (TO_THE_ENGINE, "queued", "first token", "prefill", "generate", "decode", FROM_THE_ENGINE)
"""What a request waits for, as :meth:`~verl_profiling.manifest.Request.parts` calls it."""

_NUMBERS = {name: number for number, name in enumerate(PARTS)}
_MOST_PARTS = 7


def divided_requests(
    served: Mapping[int, Request], begin: Mapping[int, int], end: Mapping[int, int]
) -> tuple[Ints, Ints, Ints]:
    """Return what spans waited for in their requests: numbers of the spans, marks, and parts between them.

    A row of marks are instants (ns) in order, from the span's begin to its end; the n-th part, a number of
    ``PARTS``, lies between the n-th mark and the next. What is before the request was sent is on the way to
    the engine, what is after its end on the way back.

    Args:
        served: The request of each span, by the span's number.
        begin: Begins of the spans (ns).
        end: Ends of the spans (ns).
    """
    edges: list[list[int]] = []
    labels: list[list[int]] = []
    for number, request in served.items():
        parts: list[tuple[str, int]] = [(name, until) for name, _, until in request.parts()]
        if not parts or parts[0][0] != TO_THE_ENGINE:  # nothing is known of it before it was sent
            parts.insert(0, (TO_THE_ENGINE, request.begin_ns))
        rest = _MOST_PARTS - len(parts)
        edges.append([begin[number], *(until for _, until in parts), *[end[number]] * rest])
        labels.append([*(_NUMBERS[name] for name, _ in parts), *[_NUMBERS[FROM_THE_ENGINE]] * rest])
    numbers = np.fromiter(served, dtype=np.int64, count=len(served))
    marks = np.array(edges, dtype=np.int64).reshape(-1, _MOST_PARTS + 1)
    marks = np.clip(np.maximum.accumulate(marks, axis=1), marks[:, :1], marks[:, -1:])
    return numbers, marks, np.array(labels, dtype=np.int64).reshape(-1, _MOST_PARTS)
