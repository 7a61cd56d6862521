"""The loop's part of the timeline, drawn from the manifest: stages, calls, and arrows to workers' stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from verl_profiling.manifest import Manifest, StageSpan
from verl_profiling.timeline.processes import STAGES_TID, TOOL_TID, draw, name_thread
from verl_profiling.timeline.trace import Event

CONTROLLER = "controller"
_ARROW = "causes"
_FIRST_RPC_TID = 1000
_STEPS_TID = 999_998
_MOST_ROWS = 64


def controller_events(manifest: Manifest, pids: Mapping[str, int], base_ns: int) -> list[Event]:
    """Return the stages and calls of the loop, the workers' stages and tools, and arrows between stages.

    Args:
        manifest: The capture.
        pids: Process id by the name of a worker (and of ``controller``).
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    own = partial(draw, base_ns, pids[CONTROLLER])
    stages = {CONTROLLER: _stages([*manifest.stages, *manifest.outside], own)}
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
        stages[worker.name] = _stages(worker.stages, partial(draw, base_ns, pid))
        if worker.tool_spans:
            events.append(name_thread(pid, TOOL_TID, "tool"))
        for tool in worker.tool_spans:
            name, of = f"{tool.name} the tool", {"stage": tool.stage} if tool.stage else {}
            events.append(draw(base_ns, pid, TOOL_TID, "capture", name, tool.begin_ns, tool.end_ns, about=of))
    for spans in stages.values():
        events += [*spans, *_spread(spans)]
    return events + _arrows(stages)


def _stages(spans: Iterable[StageSpan], draw: Callable[..., Event]) -> list[Event]:
    return [
        draw(
            STAGES_TID,
            "stage",
            span.name,
            span.begin_ns,
            span.end_ns,
            about={"failed": True} if span.failed else {},
        )
        for span in spans
    ]


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
            if isinstance(span.pid, int):
                name = f"stages {row + 1}" if row else "stages"
                names.append(name_thread(span.pid, STAGES_TID - row, name))
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
