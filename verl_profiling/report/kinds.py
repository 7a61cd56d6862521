"""Classifies the events of a trace, by the tables of :mod:`~verl_profiling.timeline.categories` and
:mod:`~verl_profiling.report.communication_kernels`.

* **Device trace** (with events of a device): busy time is the union, over all streams, of kernels and
  copies. A kernel whose name is in the table of communication is communication, any other is computation;
  copies and memsets are memory. For an NPU see :mod:`~verl_profiling.report.npu`.
* **CPU trace** (without any): busy time is the union, over all threads, of operators, calls of a runtime
  and collectives. Waiting in Python between them is not busy time.

Without the kernels that only the table of communication knows, the classes of device events are those of
HolisticTraceAnalysis 0.5 (``utils/utils.py``, ``get_kernel_type``), so that the figures can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from verl_profiling.report.communication_kernels import HOST_COLLECTIVES
from verl_profiling.timeline.categories import meaning_of

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "HOST",
    "HOST_COMMUNICATION",
    "MEMORY",
    "NOTHING",
    "UNKNOWN",
    "is_launch",
    "kind_of",
]

COMPUTE, COMMUNICATION, MEMORY, UNKNOWN, HOST, HOST_COMMUNICATION, NOTHING = range(7)
"""Kinds of events: of a device, of an unknown category, of the host, and those that do not count."""

_OPERATORS = ("cpu_op", "Operator")
_QUEUES = ("enqueue", "dequeue")  # of torch_npu, to the thread that calls the NPU
_LAUNCH = re.compile(r"Launch|runFunction|EnqueueKernel")
# MTIA records copies, waits and its own control beside kernels: names of HTA's ``types.py``, and seen ones.
_MTIA = "mtia_ccp_events"
_MTIA_COPY = re.compile(r"dma")
_MTIA_CONTROL = re.compile(
    r"job_exe|packet|cpum_exe_subgraph|collective_subgraph_execution|runFunction|event_(?:wait|record)$"
)


def kind_of(category: str, name: str, communicates: Callable[[str], bool]) -> int:
    """Return the kind of an event by its category and name.

    Args:
        category: Its category.
        name: Its name.
        communicates: Says of a kernel's name whether it communicates.
    """
    meaning = meaning_of(category)
    if meaning == "kernel":
        return _kernel(category, name, communicates)
    if meaning == "copy":
        return MEMORY
    if meaning == "collective on the host":
        return HOST_COMMUNICATION
    if meaning == "host":
        return HOST_COMMUNICATION if name.startswith(HOST_COLLECTIVES) else HOST
    if category == "user_annotation" and name.startswith(HOST_COLLECTIVES):
        return HOST_COMMUNICATION
    return UNKNOWN if meaning is None else NOTHING


def is_launch(category: str, name: str) -> bool:
    """Return whether an event is a call that gives a device something to do."""
    if category in _QUEUES:
        return True
    return meaning_of(category) == "host" and category not in _OPERATORS and bool(_LAUNCH.search(name))


def _kernel(category: str, name: str, communicates: Callable[[str], bool]) -> int:
    if category == _MTIA and _MTIA_COPY.match(name):
        return MEMORY
    if category == _MTIA and _MTIA_CONTROL.match(name):
        return NOTHING
    return COMMUNICATION if communicates(name) else COMPUTE
