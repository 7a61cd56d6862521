"""The controller's trace in Chrome's format: its stages in and around the step, its calls, and the workers.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
("Trace Event Format"); ``baseTimeNanoseconds`` as Kineto writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip

from verl_profiling.manifest import CONTROLLER_TRACE_NAME, TOOL_THREAD, Manifest, StageSpan

__all__ = ["write_controller_trace"]

_FIRST_RPC_THREAD = 1000
_TOOL_TID = 999_999
_STEPS_TID = 999_998
_CONTROLLER_PID = 1


def write_controller_trace(folder: Path, manifest: Manifest) -> None:
    """Write ``controller.trace.json.gz``; all times are on the controller's clock.

    Args:
        folder: The step folder.
        manifest: The capture.

    Raises:
        OSError: The folder cannot be written.
    """
    trace = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _base_ns(manifest),
        "verl_profiling": {
            "run_id": manifest.run_id,
            "capture_id": manifest.capture_id,
            "step": manifest.step,
        },
        "traceEvents": list(_events(manifest)),
    }
    path = folder / CONTROLLER_TRACE_NAME
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(igzip.compress(msgspec.json.encode(trace), compresslevel=1))
    part.replace(path)


def _events(manifest: Manifest) -> Iterator[dict[str, Any]]:
    base_ns = _base_ns(manifest)
    yield from _process(
        _CONTROLLER_PID, "controller", f"{manifest.controller.host} pid {manifest.controller.pid}"
    )
    yield from _steps(manifest, base_ns)
    yield from _stage_threads([*manifest.stages, *manifest.outside], _CONTROLLER_PID, base_ns)
    threads: dict[str, int] = {}
    for rpc in manifest.rpcs:
        thread = threads.get(rpc.worker)
        if thread is None:
            thread = threads[rpc.worker] = _FIRST_RPC_THREAD + len(threads)
            yield _named("thread_name", _CONTROLLER_PID, thread, f"rpc {rpc.worker}")
        arguments = {"worker": rpc.worker, "ok": rpc.ok}
        yield _span(
            rpc.method,
            "rpc",
            _CONTROLLER_PID,
            thread,
            rpc.begin_ns - base_ns,
            rpc.end_ns - base_ns,
            arguments,
        )
    for pid, worker in enumerate(manifest.workers, _CONTROLLER_PID + 1):
        yield from _process(pid, worker.name, str(worker.identity))
        workers_base_ns = base_ns + manifest.offset_ns(worker.identity)
        yield from _stage_threads(worker.stages, pid, workers_base_ns)
        if worker.tool_spans:
            yield _named("thread_name", pid, _TOOL_TID, TOOL_THREAD)
        for span in worker.tool_spans:
            begin_ns, end_ns = span.begin_ns - workers_base_ns, span.end_ns - workers_base_ns
            arguments = {"stage": span.stage} if span.stage else {}
            yield _span(f"{span.name} the tool", "capture", pid, _TOOL_TID, begin_ns, end_ns, arguments)


def _steps(manifest: Manifest, base_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a thread with the steps, where there are several."""
    if len(manifest.step_spans) < 2:
        return
    yield _named("thread_name", _CONTROLLER_PID, _STEPS_TID, "steps")
    for span in manifest.step_spans:
        version = {} if span.policy_version is None else {"policy_version": span.policy_version}
        begin_ns, end_ns = span.begin_ns - base_ns, span.end_ns - base_ns
        yield _span(f"step {span.step}", "step", _CONTROLLER_PID, _STEPS_TID, begin_ns, end_ns, version)


def _base_ns(manifest: Manifest) -> int:
    """Return the earliest time in the trace: what started the capture precedes the step."""
    starts = [
        span.begin_ns - manifest.offset_ns(worker.identity)
        for worker in manifest.workers
        for span in worker.tool_spans
    ]
    pauses = [span.begin_ns for span in manifest.outside]
    return min([manifest.begin_ns, *(rpc.begin_ns for rpc in manifest.rpcs), *pauses, *starts])


def _process(pid: int, name: str, label: str) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, name)
    yield {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _stage_threads(spans: Iterable[StageSpan], pid: int, base_ns: int) -> Iterator[dict[str, Any]]:
    """Put spans on as few threads as can hold them: on one thread, spans nest or follow each other.

    A span that runs beside another, and is not inside of it, has another thread even if it ends first.
    """
    opened: list[list[StageSpan]] = []
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns, span.depth)):
        for stack in opened:
            while stack and stack[-1].end_ns <= span.begin_ns:
                stack.pop()
        tid = _place(span, opened)
        if tid > len(opened):
            opened.append([])
            yield _named("thread_name", pid, tid, "stages" if tid == 1 else f"stages {tid}")
        opened[tid - 1].append(span)
        arguments = {"failed": True} if span.failed else {}
        yield _span(span.name, "stage", pid, tid, span.begin_ns - base_ns, span.end_ns - base_ns, arguments)


def _place(span: StageSpan, opened: list[list[StageSpan]]) -> int:
    """Return a span's thread: that of the span around it that began last, else a free one, else a new one."""
    around = [
        (stack[-1].begin_ns, tid)
        for tid, stack in enumerate(opened, 1)
        if stack and span.end_ns <= stack[-1].end_ns and span.depth > stack[-1].depth
    ]
    free = (tid for tid, stack in enumerate(opened, 1) if not stack)
    return max(around)[1] if around else next(free, len(opened) + 1)


def _span(
    name: str, category: str, pid: int, tid: int, begin_ns: int, end_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "args": arguments,
    }
