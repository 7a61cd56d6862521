"""The lanes of the rollout's requests: one slice per request, on several lanes where they overlap.

Hundreds may overlap, so they form a separate process below the engine's. Arrows lead to them from the
spans of trajectories that wait for them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_profiling.manifest import Manifest, Request
from verl_profiling.timeline.processes import REQUESTS_PID, name_process, name_row
from verl_profiling.timeline.step import Keep
from verl_profiling.timeline.trace import Event

_ARROW = "generate"
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


class RequestEvents:
    """The requests of every engine, as slices of a separate process next to the engine's.

    Attributes:
        left_out: Number of slices that were not wanted, of those that were asked for so far.

    Args:
        manifest: The capture.
        pids: Process id by the name of a worker.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        keep: What is wanted.
        arrows: What leads to the requests.
    """

    def __init__(
        self,
        manifest: Manifest,
        pids: Mapping[str, int],
        base_ns: int,
        keep: Keep,
        arrows: Iterable[Arrow] = (),
    ) -> None:
        self.left_out = 0
        self._manifest = manifest
        self._pids = pids
        self._base_ns = base_ns
        self._keep = keep
        self._leading: dict[tuple[str, int], list[Arrow]] = {}
        for arrow in arrows:
            self._leading.setdefault(arrow.request, []).append(arrow)

    def __iter__(self) -> Iterator[Event]:
        for worker in self._manifest.workers:
            if not worker.requests:
                continue
            pid = self._pids[worker.name] + REQUESTS_PID
            yield from name_process(pid, f"{worker.name} requests")
            rows = packed_rows([r.begin_ns for r in worker.requests], [r.end_ns for r in worker.requests])
            for row in range(max(rows) + 1):
                yield from name_row(pid, row, f"requests {row}")
            for request, row in zip(worker.requests, rows, strict=True):
                place = _Place(pid, row + 1, self._base_ns)
                slices = list(_slices(request, place))
                kept = self._keep.select(slices, self._base_ns)
                self.left_out += len(slices) - len(kept)
                yield from kept
                if kept:
                    for arrow in self._leading.get((request.id, request.begin_ns), ()):
                        yield _head(request, place, arrow)


class _Place(msgspec.Struct, frozen=True):
    """The row of a request, and what to subtract from its times."""

    pid: int
    tid: int
    base_ns: int


def _slices(request: Request, place: _Place) -> Iterator[Event]:
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
    whole = _event(place, f"request ({request.response_tokens} tokens)", request.begin_ns, request.end_ns)
    whole.args = msgspec.Raw(msgspec.json.encode(known))
    yield whole
    parts = request.parts()
    if len(parts) > 1:
        yield from (_event(place, *part) for part in parts)


def _event(place: _Place, name: str, begin_ns: int, end_ns: int) -> Event:
    ts, duration = (begin_ns - place.base_ns) / 1000, (end_ns - begin_ns) / 1000
    return Event("X", "request", name, place.pid, place.tid, ts, duration)


def _head(request: Request, place: _Place, arrow: Arrow) -> Event:
    """Return the end of an arrow, which points to the next slice: a microsecond earlier that is the request.

    Perfetto binds what has the request's own time to its first part. An arrow that leaves later than that,
    because clocks differ, ends inside the request.
    """
    event = Event("f", "request", _ARROW, place.pid, place.tid, id=arrow.id)
    at_ns, from_ns = request.begin_ns - place.base_ns - _APART_NS, arrow.from_ns - place.base_ns
    if at_ns <= from_ns:
        at_ns, event.bp = from_ns + _APART_NS, "e"
    event.ts = at_ns / 1000
    return event


def packed_rows(begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return a row for each of some spans: as many as overlap at once, and of those free the first."""
    rows = [0] * len(begins)
    busy: list[tuple[int, int]] = []  # until when, row
    free: list[int] = []
    for place in sorted(range(len(begins)), key=begins.__getitem__):
        while busy and busy[0][0] <= begins[place]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ends[place], rows[place]))
    return rows
