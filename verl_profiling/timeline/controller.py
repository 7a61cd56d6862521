"""The controller's part of the timeline: stages, calls, and arrows to the workers' stages."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import TOOL_THREAD
from verl_profiling.timeline.event import Event
from verl_profiling.timeline.processes import STAGES_TID, TOOL_TID, name_thread
from verl_profiling.timeline.reader import Trace
from verl_profiling.timeline.step_inputs import StepInputs

__all__ = ["CONTROLLER", "ControllerEvents", "controller_events"]

CONTROLLER = "controller"
_ARROW = "causes"
_MOST_ROWS = 64
_STAGES = re.compile(r"stages(?: \d+)?")


class ControllerEvents(NamedTuple):
    """The controller's part of a timeline.

    Attributes:
        events: The events.
        problems: What could not be read.
        limited: Whether a limit is the reason.
    """

    events: list[Event]
    problems: list[str]
    limited: bool


def controller_events(inputs: StepInputs, pids: dict[str, int], base_ns: int) -> ControllerEvents:
    """Return the events of the controller's trace, assigned to their lanes, and the arrows.

    Args:
        inputs: The step.
        pids: Process id by the name of a worker (and of ``controller``).
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    if inputs.controller is None:
        return ControllerEvents([], [], False)
    limits = inputs.limits
    most = min(limits.events, limits.controller_events)
    trace = Trace(inputs.controller, msgspec.structs.replace(limits, events=most))
    problems: list[str] = []
    events: list[Event] = []
    try:
        for chunk in trace.chunks():
            events += chunk
    except TraceFormatError as error:
        problems.append(error.problem)
    problems += map(str, trace.warnings)
    named = [f"{inputs.controller.name}: {problem}" for problem in problems]
    return ControllerEvents(_placed(events, trace.base_ns - base_ns, pids), named, trace.limited)


def _placed(events: list[Event], shift_ns: int, pids: dict[str, int]) -> list[Event]:
    names: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], int] = {}  # those that the timeline numbers itself
    for event in events:
        if event.ph == "M" and event.name in ("process_name", "thread_name"):
            name = event.said("name")
            if event.name == "process_name":
                names[event.pid] = name
            elif _STAGES.fullmatch(name):
                threads[event.pid, event.tid] = STAGES_TID
            elif name == TOOL_THREAD:
                threads[event.pid, event.tid] = TOOL_TID
    placed = []
    stages: dict[str, list[Event]] = {}
    for event in events:
        if event.name in ("process_name", "process_sort_index", "process_labels") or event.pid not in names:
            continue
        worker = names[event.pid]
        thread = threads.get((event.pid, event.tid))
        if thread == STAGES_TID and event.name == "thread_name" and event.said("name") != "stages":
            continue  # they are spread over threads below, which are named there
        event.pid = pids[worker]
        event.tid = event.tid if thread is None else thread
        if event.ts is not None:
            event.ts = round(event.ts * 1000 + shift_ns) / 1000
        if thread == STAGES_TID and event.ph == "X":
            stages.setdefault(worker, []).append(event)
        placed.append(event)
    for spans in stages.values():
        placed += _spread(spans)
    return placed + _arrows(stages)


def _spread(spans: list[Event]) -> list[Event]:
    """Put stages that overlap without nesting on separate threads, and name these.

    Perfetto nests the slices of a thread, but the stages of an asynchronous loop may overlap.
    """
    rows: list[list[Event]] = []  # the open stages of each thread
    names = []
    for span in sorted(spans, key=lambda s: (s.ts or 0.0, -(s.dur or 0.0))):
        row = next((index for index, opened in enumerate(rows) if _nests(span, opened)), len(rows))
        row = min(row, _MOST_ROWS - 1)
        if row == len(rows):
            rows.append([])
            if row and isinstance(span.pid, int):
                names.append(name_thread(span.pid, STAGES_TID - row, f"stages {row + 1}"))
        rows[row].append(span)
        span.tid = STAGES_TID - row
    return names


def _nests(span: Event, opened: list[Event]) -> bool:
    """Close the stages that ended before ``span`` began; return whether it ends inside the others."""
    while opened and _end_us(opened[-1]) <= (span.ts or 0.0):
        opened.pop()
    return not opened or _end_us(span) <= _end_us(opened[-1])


def _end_us(span: Event) -> float:
    return (span.ts or 0.0) + (span.dur or 0.0)


def _arrows(stages: dict[str, list[Event]]) -> list[Event]:
    """Return arrows from each stage of the controller to the same stage of the workers inside it.

    That is the latest one of the same name that has begun and not ended.
    """
    arrows: list[Event] = []
    opened: dict[str, list[Event]] = {}  # by name
    both = [(span, worker == CONTROLLER) for worker, spans in stages.items() for span in spans]
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
