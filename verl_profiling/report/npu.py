"""Classifies the events of an NPU trace, as CANN's msprof and torch_npu's ``trace_view.json`` have them.

These events have no category. The name of their process tells the lane, and it may come later in
the file, so events are kept until the trace is read. The lanes, according to the parser's sources
(github.com/kali20gakki/msprof, ``analysis/csrc/application/timeline``):

* ``Ascend Hardware`` (``Task Scheduler`` in older versions): one thread per stream, one event per task,
  with its type: see :func:`task_kind`.
* ``Communication`` (``HCCL`` in older versions): one thread per group with whole collectives, and
  one per plane with the transfers that they consist of, which are not counted again.
* ``CANN`` (``AscendCL``): calls of the runtime on the host.
* ``Overlap Analysis``: computed by msprof from the first two; not counted again, but compared with.

``torch.autograd.profiler`` has no categories either: its process is called ``CPU functions``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.communication_kernels import Group, group_of
from verl_profiling.report.intervals import Cover, Spans, length
from verl_profiling.report.kinds import COMMUNICATION, COMPUTE, HOST, MEMORY, NOTHING
from verl_profiling.report.process_names import ProcessNames
from verl_profiling.timeline.event import NO_ARGS, Event
from verl_profiling.units import duration

__all__ = ["NpuEvents", "task_kind"]

_HARDWARE = ("Ascend Hardware", "Task Scheduler")
_COLLECTIVES = ("Communication", "HCCL")
_OVERLAP = "Overlap Analysis"
_HOSTS = ("CANN", "AscendCL", "CPU functions")
_COLLECTIVE_KERNELS = ("AicpuKernel", "AivKernel")
_COMPUTING = re.compile(
    r"(?:^|[ _])(?:AI_?CORE|AI_?VEC(?:TOR_CORE)?|AI_?CPU|AIC|AIV|SIMT|DSA)(?:[ _]|$)", re.IGNORECASE
)
_COPYING = re.compile(r"MEMCPY|(?:^|[ _])(?:S|PCIE_)?DMA(?:[ _]|$)", re.IGNORECASE)
_WAITING = re.compile(
    r"EVENT|NOTIFY|WAIT|RECORD|WRITE[ _]VALUE|PLACE_?HOLDER|PROFILING|MAINTAINCE|ACTIVE", re.IGNORECASE
)
_TYPE_NAME = re.compile(r"[A-Z0-9_]+")
_TASK_TYPE = re.compile(rb'"Task Type"\s*:\s*"([^"]*)"')
_UNNAMED = (None, None, "", b"", "")  # of no process, so they are of no kind
_CALL_NUMBER = re.compile(r"_*_(\d+)_\d+_\d+$")  # of a collective, the first is of its group
_MOST_SHARE, _MOST_NS = 0.001, 1000  # by which our figures may differ from msprof's


def task_kind(name: str, task_type: str) -> int:
    """Return the kind of a task of the hardware.

    Tasks of the AI cores and of the AI CPU are computation, DMA tasks are copies; waits, records and
    placeholders only occupy a stream. Kernels that only drive a collective belong to it. For any other
    type (``Other`` is what msprof writes where it does not know the chip) the name decides: where msprof
    knows no operator, it gives a task its type for a name, in capitals, and that is looked at in the same
    way; a task with the name of an operator is computation.
    """
    if name.endswith(_COLLECTIVE_KERNELS):
        return NOTHING
    for told in (task_type, name if _TYPE_NAME.fullmatch(name) else ""):
        if _COMPUTING.search(told):
            return COMPUTE
        if _COPYING.search(told):
            return MEMORY
        if _WAITING.search(told):
            return NOTHING
    is_operator = bool(task_type) and name != task_type and not _TYPE_NAME.fullmatch(name)
    return COMPUTE if is_operator else NOTHING


class NpuEvents:
    """The events of one trace that have no category.

    Attributes:
        full: Whether there are more names than are told apart; the events of the rest are not counted.
    """

    def __init__(self, most_names: int, processes: ProcessNames) -> None:
        self.full = False
        self._most = most_names
        self._processes = processes
        self._parts: list[tuple[Spans, NDArray[np.int64]]] = []
        self._numbers: dict[tuple[object, object, str, bytes, str], int] = {}

    def add(self, events: Sequence[Event], spans: Spans) -> None:
        """Add events and their spans."""
        numbers = []
        for event in events:
            found = _TASK_TYPE.search(event.args)
            call = _CALL_NUMBER.search(event.name)
            name = event.name[: call.start()] if call else event.name
            group = call[1] if call and name.startswith("hcom_") else ""
            key = (event.pid, event.tid, name, found[1] if found else b"", group)
            number = self._numbers.get(key)
            if number is None:
                if len(self._numbers) > self._most:
                    self.full, key = True, _UNNAMED
                number = self._numbers.setdefault(key, len(self._numbers))
            numbers.append(number)
        self._parts.append((spans, np.array(numbers)))

    def sorted_out(
        self, number: Callable[[int, str, Group | None], int]
    ) -> Iterator[tuple[Spans, NDArray[np.int64], list[tuple[object, object]]]]:
        """Yield spans, numbers and threads of the events that count.

        Args:
            number: Returns the number of a kind, a name and a group, below 0 for events that do not count.
        """
        keys = list(self._numbers)
        given = np.array([number(self._kind(*key[:4]), key[2], _group(key[2], key[4])) for key in keys])
        for spans, numbers in self._parts:
            counted = given[numbers] >= 0
            kept = numbers[counted]
            yield spans[counted], given[kept], [keys[index][:2] for index in kept.tolist()]

    def device(self, pid: object) -> str:
        """Return which NPU a process belongs to: its label, which all processes of an NPU share."""
        return self._processes.label(pid)

    def differences(self) -> Iterator[str]:
        """Yield where the figures of the tasks are not those of the trace's own ``Overlap Analysis``."""
        parts = [(COMPUTE, "Computing"), (COMMUNICATION, "Communication")]
        classes = np.array([self._compared(*key[:4]) for key in self._numbers])
        if not np.isin(classes, [name for _, name in parts]).any():
            return
        covers = {one: Cover() for part in parts for one in part}
        for spans, numbers in self._parts:
            for one, cover in covers.items():
                cover.add(spans[classes[numbers] == str(one)])
        for kind, name in parts:
            found, told = length(covers[kind].spans()), length(covers[name].spans())
            if abs(found - told) > max(_MOST_NS, _MOST_SHARE * told):
                yield (
                    f"its Overlap Analysis has {duration(told / 1e9)} of {name}, and its tasks have "
                    f"{duration(found / 1e9)}, which is what the report shows"
                )

    def _compared(self, pid: object, tid: object, name: str, task_type: bytes) -> str:
        """Return what an event is compared as: its kind, or its row of the analysis."""
        return name if self._processes.name(pid) == _OVERLAP else str(self._kind(pid, tid, name, task_type))

    def _kind(self, pid: object, tid: object, name: str, task_type: bytes) -> int:
        process = self._processes.name(pid)
        if process in _HARDWARE:
            return task_kind(name, task_type.decode("utf-8", "replace"))
        if process in _COLLECTIVES:
            plane = self._processes.thread(pid, tid).startswith("Plane")
            return NOTHING if plane else COMMUNICATION
        return HOST if process in _HOSTS or pid in _HOSTS else NOTHING


def _group(name: str, number: str) -> Group | None:
    """Return the group of a collective: of its name and ranks, msprof has the last digits of a hash."""
    return group_of(name, NO_ARGS) or (Group("", number, 0) if number else None)
