"""Classifies the events of a trace: kind of an event, calls that block, iterations of an engine.

* **Device trace** (has device events): busy time is the union, over all streams, of kernels and copies.
  Kernels in the table of communication kernels are communication, all others computation; copies and
  memsets are memory.
* **CPU trace** (has no device events): busy time is the union, over all threads, of operators, runtime
  calls and collectives. Waiting in Python between them is not busy time.
* **NPU trace** (msprof's, in torch_npu's ``trace_view.json``): events have no category. The name of an
  event's process decides its kind; for events of the hardware, the task type does.

Device events are classified as in HolisticTraceAnalysis 0.5 (``utils/utils.py``, ``get_kernel_type``), so
figures can be compared. The table of communication kernels has further kernels that HTA does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from verl_profiling.report.communication_kernels import HOST_COLLECTIVES
from verl_profiling.timeline.categories import CATEGORIES, meaning_of

COMPUTE, COMMUNICATION, MEMORY, UNKNOWN, HOST, HOST_COMMUNICATION, ITERATION, NOTHING = range(8)
"""Kinds of events: three on the device, an unknown category, two on the host, engine iteration, no work."""

_QUEUES = ("enqueue", "dequeue")  # of torch_npu, to the thread that calls the NPU
NO_WORK = frozenset(
    name
    for category in CATEGORIES
    if category.meaning in ("no work", "on device, no work")
    for name in category.names
) - {"user_annotation", *_QUEUES}
"""Categories whose events are no busy time."""

_OPERATORS = ("cpu_op", "Operator")
_LAUNCH = re.compile(r"Launch|runFunction|EnqueueKernel")
# MTIA gives copies, waits and control tasks the category of kernels; names: HTA's ``types.py`` and traces.
_MTIA = "mtia_ccp_events"
_MTIA_COPY = re.compile(r"dma")
_MTIA_CONTROL = re.compile(
    r"job_exe|packet|cpum_exe_subgraph|collective_subgraph_execution|runFunction|event_(?:wait|record)$"
)


def kind_of(category: str, name: str, communicates: Callable[[str], bool]) -> int:
    """Return the kind of an event by its category and name.

    Args:
        category: Category of the event.
        name: Name of the event.
        communicates: Returns whether the kernel of a given name communicates.
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
    if category == "user_annotation" and parse_iteration(name):
        return ITERATION
    return UNKNOWN if meaning is None else NOTHING


def _kernel(category: str, name: str, communicates: Callable[[str], bool]) -> int:
    if category == _MTIA and _MTIA_COPY.match(name):
        return MEMORY
    if category == _MTIA and _MTIA_CONTROL.match(name):
        return NOTHING
    return COMMUNICATION if communicates(name) else COMPUTE


def is_launch(category: str, name: str) -> bool:
    """Return whether an event is a host call that enqueues work on a device."""
    if category in _QUEUES:
        return True
    return meaning_of(category) == "host" and category not in _OPERATORS and bool(_LAUNCH.search(name))


# Process names in an NPU trace, from msprof's parser (github.com/kali20gakki/msprof,
# ``analysis/csrc/application/timeline``); the second name of each pair is from older versions.
_HARDWARE = ("Ascend Hardware", "Task Scheduler")  # a thread per stream, an event per task
_COLLECTIVES = ("Communication", "HCCL")  # a thread per group; "Plane" threads hold parts of collectives
_HOSTS = ("CANN", "AscendCL", "CPU functions")  # runtime calls; "CPU functions": torch.autograd.profiler
OVERLAP = "Overlap Analysis"
"""Name of the process whose events are msprof's own overlap figures."""

_COLLECTIVE_KERNELS = ("AicpuKernel", "AivKernel")
_COMPUTING = re.compile(
    r"(?:^|[ _])(?:AI_?CORE|AI_?VEC(?:TOR_CORE)?|AI_?CPU|AIC|AIV|SIMT|DSA)(?:[ _]|$)", re.IGNORECASE
)
_COPYING = re.compile(r"MEMCPY|(?:^|[ _])(?:S|PCIE_)?DMA(?:[ _]|$)", re.IGNORECASE)
_WAITING = re.compile(
    r"EVENT|NOTIFY|WAIT|RECORD|WRITE[ _]VALUE|PLACE_?HOLDER|PROFILING|MAINTAINCE|ACTIVE", re.IGNORECASE
)
_TYPE_NAME = re.compile(r"[A-Z0-9_]+")


def npu_kind(process: str, pid: object, thread: str, name: str, task_type: str) -> int:
    """Return the kind of an event without a category, by the names of its process and thread."""
    if process in _HARDWARE:
        return task_kind(name, task_type)
    if process in _COLLECTIVES:
        return NOTHING if thread.startswith("Plane") else COMMUNICATION
    return HOST if process in _HOSTS or pid in _HOSTS else NOTHING


def task_kind(name: str, task_type: str) -> int:
    """Return the kind of a task of the hardware.

    Tasks of AI cores and AI CPU are computation, DMA tasks are copies. Waits, records and placeholders
    are no work. Kernels that drive a collective are no work either: the collective has its own event.
    Any other type (``Other``: msprof does not know the chip) is decided by the task's name. A name in
    capitals is a task type, e.g. ``MEMCPY_ASYNC``, and is matched as one; any other name is an
    operator's, and its task is computation.
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


# Calls of the CUDA runtime and driver API, of HIP and of AscendCL. An asynchronous copy returns after about
# 10 us, but a copy from pageable memory blocks ("API synchronization behavior" in the CUDA Runtime API).
# So an asynchronous copy counts as blocking if the call takes long.
LONG_COPY_NS = 100_000
_BLOCKING = re.compile(
    r"(?:AscendCL@)?(?:cuda|cu|hip|aclrt)"
    r"(?:Memcpy|Malloc|Free|MemAlloc|MemFree|HostAlloc|HostRegister|\w*Synchronize)"
)
_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


def blocks_from_ns(name: str) -> int | None:
    """Return the duration (ns) from which a call counts as blocking; ``None`` for calls that never block."""
    if not _BLOCKING.match(name):
        return None
    if "Async" not in name:
        return 0
    return LONG_COPY_NS if "Memcpy" in name else None


def launches_graph(name: str) -> bool:
    """Return whether a call launches a graph of kernels."""
    return _GRAPH_LAUNCH.match(name) is not None


# vLLM: ``execute_context_<requests>(<tokens>)_generation_<requests>(<tokens>)``; SGLang: ``step[EXTEND
# bs=<requests> toks=<tokens>]`` and ``step[DECODE bs=<requests>]``. Seen in vLLM 0.32 and SGLang 0.5.12.
_VLLM = re.compile(r"execute_context_(\d+)\((\d{1,12})\)_generation_(\d+)\((\d{1,12})\)$", re.ASCII)
_SGLANG = re.compile(r"step\[(EXTEND|DECODE)\S* bs=(\d{1,12})(?: toks=(\d{1,12}))?", re.ASCII)


def parse_iteration(name: str) -> tuple[int, int] | None:
    """Parse the name of an engine iteration into (prompt tokens, new tokens); ``None`` for other names."""
    if match := _VLLM.match(name):
        return int(match[2]), int(match[4])
    if match := _SGLANG.match(name):
        return (int(match[3] or 0), 0) if match[1] == "EXTEND" else (0, int(match[2]))
    return None
