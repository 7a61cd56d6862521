"""Classifies the events of a trace.

* **Device trace** (with kernels, copies or memsets): busy time is the union, over all streams, of
  ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` events. A kernel whose name contains ``nccl`` is
  communication, any other is computation; copies and memsets are memory. For an NPU see
  :mod:`~verl_profiling.report.npu`.
* **CPU trace** (without any): busy time is the union, over all threads, of ``cpu_op`` events and of
  collectives. Names with ``gloo:``, ``nccl:``, ``mpi:`` and ``c10d::`` are communication, all other
  operators are computation. Waiting in Python between operators is not busy time.

The classes of device events are those of HolisticTraceAnalysis 0.5 (``utils/utils.py``,
``get_kernel_type``), so that the figures can be compared.
"""

from __future__ import annotations

__all__ = ["COMMUNICATION", "COMPUTE", "HOST", "HOST_COMMUNICATION", "MEMORY", "NOTHING", "kind_of"]

COMPUTE, COMMUNICATION, MEMORY, HOST, HOST_COMMUNICATION, NOTHING = range(6)

_DEVICE_KINDS = {"kernel": COMPUTE, "gpu_memcpy": MEMORY, "gpu_memset": MEMORY}
_HOST_CATEGORIES = {"cpu_op", "cuda_runtime", "cuda_driver"}
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "c10d::")


def kind_of(category: str, name: str) -> int:
    """Return the kind of an event by its category and name."""
    kind = _DEVICE_KINDS.get(category)
    if kind is not None:
        return COMMUNICATION if kind == COMPUTE and "nccl" in name.lower() else kind
    if category in _HOST_CATEGORIES:
        return HOST_COMMUNICATION if name.startswith(_COLLECTIVES) else HOST
    if category == "user_annotation" and name.startswith(_COLLECTIVES):
        return HOST_COMMUNICATION
    return NOTHING
