"""The lanes of the rollout's requests: one slice per request, on several lanes where they overlap.

Hundreds may overlap, so they form a separate process below the engine's.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import msgspec

from verl_profiling.manifest import Manifest, Request
from verl_profiling.timeline.event import Event
from verl_profiling.timeline.processes import LANE_PIDS, name_process, name_thread

__all__ = ["request_events"]

_LAST_PID = LANE_PIDS - 1


def request_events(manifest: Manifest, pids: Mapping[str, int], base_ns: int) -> list[Event]:
    """Return the requests of every engine as slices of a separate process next to the engine's.

    Args:
        manifest: The capture.
        pids: Process id by the name of a worker.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    events: list[Event] = []
    for worker in manifest.workers:
        shift_ns = base_ns + manifest.offset_ns(worker.identity)
        pid = pids[worker.name] + _LAST_PID if worker.requests else 0
        free: list[tuple[int, int]] = []  # (time at which it is free, row)
        rows = 0
        for request in sorted(worker.requests, key=lambda r: r.begin_ns):
            if free and free[0][0] <= request.begin_ns:
                _, row = heapq.heappop(free)
            else:
                row, rows = rows, rows + 1
            heapq.heappush(free, (request.end_ns, row))
            events += _slices(request, pid, row + 1, shift_ns)
        for row in range(rows):
            events.append(name_thread(pid, row + 1, f"requests {row}"))
            order = msgspec.Raw(b'{"sort_index":%d}' % row)
            events.append(Event("M", name="thread_sort_index", pid=pid, tid=row + 1, args=order))
        if rows:
            events += name_process(pid, f"{worker.name} requests")
    return events


def _slices(request: Request, pid: int, tid: int, shift_ns: int) -> list[Event]:
    """Return the slice of a request and, if known, inside it that of the wait for its first token."""
    facts = {
        "prompt_tokens": request.prompt_tokens,
        "response_tokens": request.response_tokens,
        "failed": request.failed,
    }
    ts = (request.begin_ns - shift_ns) / 1000
    whole = Event("X", "request", f"request ({request.response_tokens} tokens)", pid, tid, ts)
    whole.dur = (request.end_ns - request.begin_ns) / 1000
    whole.args = msgspec.Raw(msgspec.json.encode(facts))
    if not request.first_token_ns:
        return [whole]
    waiting = Event("X", "request", "first token", pid, tid, ts)
    waiting.dur = (request.first_token_ns - request.begin_ns) / 1000
    return [whole, waiting]
