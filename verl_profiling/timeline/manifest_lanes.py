"""Lanes drawn from the manifest: stages and calls of the loop, workers' stages, engines' requests, arrows.

Hundreds of requests may overlap, so the requests of an engine form a process of their own. Arrows lead from
the ``generate`` spans of trajectories to their requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

import msgspec

from verl_profiling.manifest import CaptureResult, Manifest, Request, StageSpan
from verl_profiling.timeline.processes import (
    REQUESTS_PID,
    STAGES_TID,
    TOOL_TID,
    draw,
    name_process,
    name_row,
    name_thread,
    packed_rows,
    stages_by_row,
)
from verl_profiling.timeline.step import Keep
from verl_profiling.timeline.trace import Event

CONTROLLER = "controller"
_ARROW = "causes"
_FIRST_RPC_TID = 1000
_STEPS_TID = 999_998
_APART_NS = 1_000  # more than Perfetto's rounding of times (1 ns)


def controller_events(manifest: Manifest, pids: Mapping[str, int], base_ns: int) -> list[Event]:
    """Return the loop's stages and calls, the workers' stages and tools, and arrows between stages.

    Args:
        manifest: The capture.
        pids: Process id by the name of a worker (and of ``controller``).
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    own = partial(draw, base_ns, pids[CONTROLLER])
    stages = {CONTROLLER: _stages([*manifest.stages, *manifest.outside], base_ns, pids[CONTROLLER])}
    events = []
    if len(manifest.step_spans) > 1:
        events.append(name_thread(pids[CONTROLLER], _STEPS_TID, "steps"))
        for step in manifest.step_spans:
            version = step.policy_version
            about = {} if version is None else {"policy_version": version}
            events.append(
                own(_STEPS_TID, "step", f"step {step.step}", step.begin_ns, step.end_ns, about=about)
            )
    threads: dict[str, int] = {}
    for rpc in manifest.rpcs:
        if rpc.worker not in threads:
            threads[rpc.worker] = _FIRST_RPC_TID + len(threads)
            events.append(name_thread(pids[CONTROLLER], threads[rpc.worker], f"rpc {rpc.worker}"))
        called = {"worker": rpc.worker, "ok": rpc.ok}
        events.append(own(threads[rpc.worker], "rpc", rpc.method, rpc.begin_ns, rpc.end_ns, about=called))
    for worker in manifest.workers:
        if not (worker.stages or worker.tool_spans):
            continue
        pid = pids[worker.name]
        stages[worker.name] = _stages(worker.stages, base_ns, pid)
        if worker.tool_spans:
            events.append(name_thread(pid, TOOL_TID, "tool"))
        for tool in worker.tool_spans:
            name, of = f"{tool.name} the tool", {"stage": tool.stage} if tool.stage else {}
            events.append(draw(base_ns, pid, TOOL_TID, "capture", name, tool.begin_ns, tool.end_ns, about=of))
    return [*events, *chain.from_iterable(stages.values()), *_arrows(stages)]


def _stages(spans: Iterable[StageSpan], base_ns: int, pid: int) -> list[Event]:
    """Draw stages; those that overlap without nesting are on separate threads, which are named."""
    events, rows = [], set[int]()
    for span, row in stages_by_row(spans):
        about = {"failed": True} if span.failed else {}
        place = (base_ns, pid, STAGES_TID - row, "stage", span.name)
        events.append(draw(*place, span.begin_ns, span.end_ns, about=about))
        rows.add(row)
    names = (name_thread(pid, STAGES_TID - row, f"stages {row + 1}" if row else "stages") for row in rows)
    return [*events, *names]


def _end_us(span: Event) -> float:
    return (span.ts or 0.0) + (span.dur or 0.0)


def _arrows(stages: dict[str, list[Event]]) -> list[Event]:
    """Return arrows from the controller's stages to the workers' stages of the same name inside them.

    If several such stages of the controller are open, the arrow starts at the latest.
    """
    arrows: list[Event] = []
    opened: dict[str, list[Event]] = {}  # by name
    both = [
        (span, worker == CONTROLLER) for worker, spans in stages.items() for span in spans if span.ph == "X"
    ]
    for span, is_cause in sorted(both, key=lambda one: (one[0].ts or 0.0, not one[1])):
        causes = opened.setdefault(span.name, [])
        if is_cause:
            causes.append(span)
            continue
        while causes and _end_us(causes[-1]) < (span.ts or 0.0):
            causes.pop()
        if causes:
            number = len(arrows) // 2 + 1
            arrows += (_end(causes[-1], "s", number), _end(span, "f", number))
    return arrows


def _end(stage: Event, phase: str, number: int) -> Event:
    bind = "e" if phase == "f" else None
    return Event(phase, "stage", _ARROW, stage.pid, stage.tid, stage.ts, id=number, bp=bind)


class Arrow(msgspec.Struct, frozen=True):
    """An arrow from a ``generate`` span to its request.

    Attributes:
        id: Number of the arrow in the timeline.
        request: Id and begin (unix ns) of the request.
        from_ns: Time of the arrow's tail (unix ns, controller's clock).
    """

    id: int
    request: tuple[str, int]
    from_ns: int


def requests_by_id(manifest: Manifest) -> dict[str, list[Request]]:
    """Return the requests by their id, sorted by begin; requests without an id are left out."""
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
    """Return the request of each span, by the span's number; spans without a request are left out.

    Several requests may have the span's request id, e.g. after a retry. Of the last one before the span's
    begin and the first one after it, the span gets the one with the larger overlap.

    Args:
        spans: (number, request id, begin, end) of each span, in unix ns.
        requests: The requests by id, sorted by begin.
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
    """Return the slices of an engine's requests, in a process of their own, and the number left out.

    Args:
        worker: The engine.
        pid: First process id of its lane.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        keep: Selection of the slices.
        leading: Arrows to each request, by its id and begin.
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
    """Yield the slice of a request, and one slice per part inside it if there are several parts."""
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
    """Return the head of an arrow, 1 us before the request; Perfetto attaches it to the next slice.

    At the request's own begin, Perfetto would attach the head to the request's first part. If the tail is
    later than the request's begin (clock error), the head is 1 us after the tail.
    """
    at_ns, inside = request.begin_ns - _APART_NS, None
    if at_ns <= arrow.from_ns:
        at_ns, inside = arrow.from_ns + _APART_NS, "e"
    ts = (at_ns - base_ns) / 1000
    return Event("f", "request", "generate", pid, tid, ts, id=arrow.id, bp=inside)
