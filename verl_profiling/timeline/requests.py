"""The lanes of the rollout's requests: one slice per request, on several lanes where they overlap.

Hundreds may overlap, so they form a separate process below the engine's. Arrows lead to them from the
spans of trajectories that wait for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import msgspec

from verl_profiling.manifest import CaptureResult, Manifest, Request
from verl_profiling.timeline.processes import REQUESTS_PID, draw, name_process, name_row
from verl_profiling.timeline.rows import packed_rows
from verl_profiling.timeline.step import Keep
from verl_profiling.timeline.trace import Event

_APART_NS = 1_000  # Perfetto may cut off a nanosecond of a time


class Arrow(msgspec.Struct, frozen=True):
    """Leads from the span that waits for a request to the request.

    Attributes:
        id: Number of the arrow in the timeline.
        request: Id and begin of the request.
        from_ns: When it leaves, on the controller's clock.
    """

    id: int
    request: tuple[str, int]
    from_ns: int


def requests_by_id(manifest: Manifest) -> dict[str, list[Request]]:
    """Return the requests that have an id, by that; those of one id in order of their begin."""
    found: dict[str, list[Request]] = {}
    for worker in manifest.workers:
        for request in worker.requests:
            if request.id:
                found.setdefault(request.id, []).append(request)
    for served in found.values():
        served.sort(key=_begin)
    return found


def joined(
    spans: Iterable[tuple[int, str, int, int]], requests: Mapping[str, list[Request]]
) -> dict[int, Request]:
    """Return the request of each span that has one.

    An engine may see one id several times. Of those requests it is the one that the span shares most time
    with, of the two that begin around it; a request that shares none is not the span's.

    Args:
        spans: Number, id of the request, begin and end (ns) of each span.
        requests: The requests by id.
    """
    found = {}
    for number, id, begin, end in spans:
        served = requests.get(id, [])
        place = bisect_left(served, begin, key=_begin) if len(served) > 1 else 0
        near = served[max(place - 1, 0) : place + 1]
        overlap, best = max(
            ((_common(one, begin, end), index) for index, one in enumerate(near)), default=(-1, 0)
        )
        if overlap >= 0:
            found[number] = near[best]
    return found


def _begin(request: Request) -> int:
    return request.begin_ns


def _common(request: Request, begin: int, end: int) -> int:
    return min(request.end_ns, end) - max(request.begin_ns, begin)


def request_events(
    worker: CaptureResult, pid: int, base_ns: int, keep: Keep, leading: Mapping[tuple[str, int], list[Arrow]]
) -> tuple[list[Event], int]:
    """Return the requests of an engine as slices of a process of their own, and how many are left out.

    Args:
        worker: The engine.
        pid: First process id of its lane.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        keep: Which slices are wanted.
        leading: The arrows that lead to each request.
    """
    pid += REQUESTS_PID
    rows = packed_rows([(request.begin_ns, request.end_ns) for request in worker.requests])
    events = name_process(pid, f"{worker.name} requests") if rows else []
    for row in range(max(rows, default=-1) + 1):
        events += name_row(pid, row, f"requests {row}")
    left_out = 0
    for request, row in zip(worker.requests, rows, strict=True):
        slices = list(_slices(request, partial(draw, base_ns, pid, row + 1, "request")))
        kept = keep.select(slices, base_ns)
        left_out += len(slices) - len(kept)
        events += kept
        if kept:
            arrows = leading.get((request.id, request.begin_ns), ())
            events += (_head(request, arrow, base_ns, pid, row + 1) for arrow in arrows)
    return events, left_out


def _slices(request: Request, draw: Callable[..., Event]) -> Iterator[Event]:
    """Yield the slice of a request and inside it those of its parts, where any of them is known apart."""
    facts = {
        "prompt_tokens": request.prompt_tokens,
        "response_tokens": request.response_tokens,
        "failed": request.failed,
        "id": request.id or None,
        "cached_tokens": request.cached_tokens,
        "preemptions": request.preemptions,
        "policy_version": request.policy_version,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    name = f"request ({request.response_tokens} tokens)"
    yield draw(name, request.begin_ns, request.end_ns, about=known)
    parts = request.parts()
    if len(parts) > 1:
        yield from (draw(*part) for part in parts)


def _head(request: Request, arrow: Arrow, base_ns: int, pid: int, tid: int) -> Event:
    """Return the end of an arrow, which points to the next slice: a microsecond earlier that is the request.

    Perfetto binds what has the request's own time to its first part. An arrow that leaves later than that,
    because clocks differ, ends inside the request.
    """
    at_ns, inside = request.begin_ns - _APART_NS, None
    if at_ns <= arrow.from_ns:
        at_ns, inside = arrow.from_ns + _APART_NS, "e"
    ts = (at_ns - base_ns) / 1000
    return Event("f", "request", "generate", pid, tid, ts, id=arrow.id, bp=inside)
