"""Events of the timeline that come from the manifest, not from a trace.

They are stages and calls of the loop, stages of workers, requests of engines, and arrows. Hundreds
of requests may overlap, so the requests of an engine are a process of their own. Arrows lead from
the ``generate`` spans of trajectories to their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import starmap

from verl_profiling.manifest import (
    CaptureResult,
    Manifest,
    Request,
    Rpc,
    StageSpan,
    StepSpan,
    ToolSpan,
)
from verl_profiling.steps.trace import Event
from verl_profiling.steps.trajectory_spans import packed_rows, stages_by_row
from verl_profiling.timeline.processes import (
    PATH_PID,
    PAUSES_TID,
    REQUESTS_PID,
    STAGES_TID,
    TOOL_TID,
    draw,
    metadata,
    name_process,
    name_row,
)

CONTROLLER = "controller"
_ARROW = "causes"
_FIRST_RPC_TID = 1000
_STEPS_TID = 999_998
_APART_NS = 1_000  # more than Perfetto's rounding of times (1 ns)


def controller_events(manifest: Manifest, pids: Mapping[str, int], base_ns: int) -> list[Event]:
    """Return the loop's stages and calls, the workers' stages and tools, pauses, and arrows between
    stages.

    Args:
        manifest: Manifest of the capture.
        pids: Process id by the name of a worker (and of ``controller``).
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    events: list[Event] = []
    stages: list[Event] = []
    named: set[tuple[str, int]] = set()
    for (who, tid, title), category, name, span, about in _from_manifest(manifest):
        if (who, tid) not in named:
            named.add((who, tid))
            events.append(metadata("thread_name", pids[who], tid, {"name": title}))
        times = span.begin_ns, span.end_ns
        drawn = draw(base_ns, pids[who], tid, category, name, *times, _without_none(about))
        if category == "stage":
            stages.append(drawn)
        else:
            events.append(drawn)
    return [*events, *stages, *_arrows(stages, pids[CONTROLLER])]


def _without_none(about: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in about.items() if value is not None}


Slice = tuple[str, int, int, Mapping[str, object]]
"""Name, begin, end (unix ns) and arguments of a slice."""

_Span = StepSpan | Rpc | StageSpan | ToolSpan
_Drawn = tuple[tuple[str, int, str], str, str, _Span, Mapping[str, object]]
"""Process, thread and name of the thread; category, name, times and arguments of a slice."""


def _from_manifest(manifest: Manifest) -> Iterator[_Drawn]:
    """Yield the slices of steps, calls, pauses, stages and tools, the loop's slices before the
    workers'.
    """
    if len(manifest.step_spans) > 1:
        for step in manifest.step_spans:
            about = {"policy_version": step.policy_version}
            yield (CONTROLLER, _STEPS_TID, "steps"), "step", f"step {step.step}", step, about
    threads: dict[str, int] = {}
    for rpc in manifest.rpcs:
        tid = threads.setdefault(rpc.worker, _FIRST_RPC_TID + len(threads))
        called = {"worker": rpc.worker, "ok": rpc.ok}
        yield (CONTROLLER, tid, f"rpc {rpc.worker}"), "rpc", rpc.method, rpc, called
    outer_stages = [*manifest.stages, *manifest.around_the_step]
    yield from _of_process(CONTROLLER, outer_stages, manifest.pauses)
    for worker in manifest.workers:
        yield from _of_process(worker.name, worker.stages, worker.pauses)
    for worker in manifest.workers:
        for tool in worker.tool_spans:
            title = f"{tool.name} of the tool"
            of_stage = {"stage": tool.stage or None}
            yield (worker.name, TOOL_TID, "tool"), "capture", title, tool, of_stage


def _of_process(
    who: str, stages: Iterable[StageSpan], pauses: Iterable[StageSpan]
) -> Iterator[_Drawn]:
    """Yield pauses and stages; stages that overlap without nesting are on separate threads."""
    for pause in pauses:
        yield (who, PAUSES_TID, "pauses"), "pause", pause.name, pause, {}
    for span, row in stages_by_row(stages):
        title = "stages"
        if row:
            title += f" {row + 1}"
        about = {"failed": span.failed or None}
        yield (who, STAGES_TID - row, title), "stage", span.name, span, about


def _arrows(stages: list[Event], controller: int) -> list[Event]:
    """Return arrows from the controller's stages to the workers' stages of the same name inside
    them.

    If several stages of the controller with this name are open, the arrow starts at the latest.

    Args:
        stages: Slices of the stages.
        controller: Process id of the controller.
    """
    arrows: list[Event] = []
    opened: dict[str, list[Event]] = {}  # by name
    for span in sorted(stages, key=lambda span: (span.ts or 0.0, span.pid != controller)):
        causes = opened.setdefault(span.name, [])
        if span.pid == controller:
            causes.append(span)
            continue
        while causes and (causes[-1].ts or 0.0) + (causes[-1].dur or 0.0) < (span.ts or 0.0):
            causes.pop()
        if causes:
            number = len(arrows) // 2 + 1
            arrows += (_end(causes[-1], "s", number), _end(span, "f", number))
    return arrows


def _end(stage: Event, phase: str, number: int) -> Event:
    bind = "e" if phase == "f" else None
    return Event(phase, "stage", _ARROW, stage.pid, stage.tid, stage.ts, id=number, bp=bind)


def path_events(path: Iterable[Slice], base_ns: int) -> list[Event]:
    """Return the slices of the critical path, in the first process.

    Args:
        path: Slices of the critical path.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    slices = [draw(base_ns, PATH_PID, 1, "critical path", *part) for part in path]
    return [*name_process(PATH_PID, "critical path"), *slices] if slices else []


def request_rows(worker: CaptureResult) -> list[int]:
    """Return the row of each request of an engine; requests of a row do not overlap."""
    return packed_rows([(request.begin_ns, request.end_ns) for request in worker.requests])


def request_events(worker: CaptureResult, pid: int, base_ns: int) -> list[Event]:
    """Return the slices of an engine's requests, in a process of their own.

    Args:
        worker: The engine.
        pid: First process id of the engine's lane.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    pid += REQUESTS_PID
    rows = request_rows(worker)
    events = name_process(pid, f"{worker.name} requests") if rows else []
    for row in range(max(rows, default=-1) + 1):
        events += name_row(pid, row, f"requests {row}")
    for request, row in zip(worker.requests, rows, strict=True):
        events += _slices(request, partial(draw, base_ns, pid, row + 1, "request"))
    return events


def _slices(request: Request, draw: Callable[..., Event]) -> Iterator[Event]:
    """Yield the slice of a request, and inside it its parts (e.g. ``queued``, ``decode``), if
    several.
    """
    facts = {
        "prompt_tokens": request.prompt_tokens,
        "response_tokens": request.response_tokens,
        "failed": request.failed,
        "id": request.id or None,
        "cached_tokens": request.cached_tokens,
        "preemptions": request.preemptions,
        "policy_version": request.policy_version,
    }
    title = f"request ({request.response_tokens} tokens)"
    yield draw(title, request.begin_ns, request.end_ns, about=_without_none(facts))
    parts = request.parts()
    if len(parts) > 1:
        yield from starmap(draw, parts)


def request_arrow(
    number: int,
    tail: tuple[int, int],
    from_ns: int,
    request: Request,
    head: tuple[int, int],
    base_ns: int,
) -> tuple[Event, Event]:
    """Return the two ends of an arrow from a span to its request.

    The head is 1 us before the request, and Perfetto attaches the head to the next slice. At the
    request's begin, Perfetto would attach the head to the first part of the request. If the tail is
    later than the request's begin (clock error), the head is 1 us after the tail.

    Args:
        number: Number of the arrow in the timeline.
        tail: Process and thread of the span.
        from_ns: Begin of the span (unix ns, controller's clock).
        request: The request.
        head: Process and thread of the request.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    at_ns, inside = request.begin_ns - _APART_NS, None
    if at_ns <= from_ns:
        at_ns, inside = from_ns + _APART_NS, "e"
    start = Event("s", "request", "generate", *tail, (from_ns - base_ns) / 1000, id=number)
    end = Event("f", "request", "generate", *head, (at_ns - base_ns) / 1000, id=number, bp=inside)
    return start, end
