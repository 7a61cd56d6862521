"""Classifies the events of an NPU trace, as CANN's msprof and torch_npu's ``trace_view.json`` have them.

These events have no category. The name of their process tells the lane, and it may come later in
the file, so events are kept until the trace is read. The lanes, according to the parser's sources
(github.com/kali20gakki/msprof, ``analysis/csrc/application/timeline``):

* ``Ascend Hardware``: one thread per stream, one event per task, with its ``Task Type``. Tasks of
  the AI cores and of the AI CPU are computation, DMA tasks are copies; waits, records and
  placeholders only occupy a stream. Kernels that only drive a collective belong to it.
* ``Communication`` (``HCCL`` in older versions): one thread per group with whole collectives, and
  one per plane with the transfers that they consist of, which are not counted again.
* ``CANN``: calls of the runtime on the host.
* ``Overlap Analysis``: computed by msprof from the first two; not counted again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.intervals import Spans
from verl_profiling.report.kinds import COMMUNICATION, COMPUTE, HOST, MEMORY, NOTHING
from verl_profiling.timeline.event import Event

__all__ = ["NpuEvents"]

_COMPUTING_TASKS = {
    *("AI_CORE", "AIC", "KERNEL_AICORE", "AI_VECTOR_CORE", "AIV", "AIV_SQE", "KERNEL_AIVEC"),
    *("MIX_AIC", "MIX_AIV", "KERNEL_MIX_AIC", "KERNEL_MIX_AIV", "AI_CPU", "KERNEL_AICPU", "DSA_SQE"),
}
_COPYING_TASKS = {"SDMA", "SDMA_SQE", "MEMCPY_ASYNC", "PCIE_DMA_SQE"}
_COLLECTIVE_KERNELS = ("AicpuKernel", "AivKernel")
_TASK_TYPE = re.compile(rb'"Task Type"\s*:\s*"([^"]*)"')
_OTHERS = (None, None, "", b"")  # of no process, so they are of no kind
_CALL_NUMBER = re.compile(r"_*_\d+_\d+_\d+$")


class NpuEvents:
    """The events of one trace that have no category, and the names of its processes and threads.

    Attributes:
        full: Whether there are more names than are told apart; the events of the rest are not counted.
    """

    def __init__(self, most_names: int) -> None:
        self.full = False
        self._most = most_names
        self._parts: list[tuple[Spans, NDArray[np.int64]]] = []
        self._numbers: dict[tuple[object, object, str, bytes], int] = {}
        self._processes: dict[object, str] = {}
        self._threads: dict[tuple[object, object], str] = {}

    def name(self, event: Event) -> None:
        """Add the name of a process or a thread."""
        if event.name not in ("process_name", "thread_name"):
            return
        if len(self._processes) + len(self._threads) >= self._most:
            self.full = True
        elif event.name == "process_name":
            self._processes[event.pid] = event.said("name")
        else:
            self._threads[event.pid, event.tid] = event.said("name")

    def add(self, events: Sequence[Event], spans: Spans) -> None:
        """Add events and their spans."""
        numbers = []
        for event in events:
            found = _TASK_TYPE.search(event.args)
            key = (event.pid, event.tid, _CALL_NUMBER.sub("", event.name), found[1] if found else b"")
            number = self._numbers.get(key)
            if number is None:
                if len(self._numbers) > self._most:
                    self.full, key = True, _OTHERS
                number = self._numbers.setdefault(key, len(self._numbers))
            numbers.append(number)
        self._parts.append((spans, np.array(numbers)))

    def sorted_out(
        self, number: Callable[[int, str], int]
    ) -> Iterator[tuple[Spans, NDArray[np.int64], list[tuple[object, object]]]]:
        """Yield spans, numbers and threads of the events that count.

        Args:
            number: Returns the number of a kind and a name, below 0 for events that do not count.
        """
        keys = list(self._numbers)
        given = np.array([number(self._kind(*key), key[2]) for key in keys])
        for spans, numbers in self._parts:
            counted = given[numbers] >= 0
            kept = numbers[counted]
            yield spans[counted], given[kept], [keys[index][:2] for index in kept.tolist()]

    def _kind(self, pid: object, tid: object, name: str, task_type: bytes) -> int:
        process = self._processes.get(pid, "")
        if process == "Ascend Hardware":
            task = task_type.decode("utf-8", "replace")
            if task in _COMPUTING_TASKS and not name.endswith(_COLLECTIVE_KERNELS):
                return COMPUTE
            return MEMORY if task in _COPYING_TASKS else NOTHING
        if process in ("Communication", "HCCL"):
            plane = self._threads.get((pid, tid), "").startswith("Plane")
            return NOTHING if plane else COMMUNICATION
        return HOST if process == "CANN" else NOTHING
