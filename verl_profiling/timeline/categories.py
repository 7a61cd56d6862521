"""The categories of trace events: one table for all accelerators, which the documentation prints.

A category that is not in the table is unknown. Device events of unknown category are shown as
unrecognised work of the device (see :mod:`~verl_profiling.report.kinds`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from verl_profiling.timeline.trace import Event

Meaning = Literal["kernel", "copy", "on device, no work", "host", "collective on the host", "no work"]

_KINETO = "https://github.com/pytorch/kineto/blob/main/libkineto/include/ActivityType.h"
_OLD = "https://github.com/pytorch/kineto/blob/be239c04/tb_plugin/torch_tb_profiler/profiler/trace.py"
_HTA = "https://github.com/facebookresearch/HolisticTraceAnalysis/blob/main/hta/common/types.py"
_XPU = "https://github.com/pytorch/kineto/tree/main/libkineto/src/plugin/xpupti"
_GAUDI = "https://github.com/HabanaAI/gaudi-pytorch-bridge"
_MLU = (
    "https://github.com/Cambricon/torch_mlu/blob/main/third_party/kineto_mlu/libkineto/src/ActivityType.cpp"
)
_NPU = "https://github.com/Ascend/pytorch/tree/master/torch_npu/profiler/analysis"


class Category(NamedTuple):
    """The meaning of one or several categories.

    Attributes:
        names: The categories; ``*`` stands for the name of any vendor.
        of: Accelerators, or versions of torch, whose traces have the categories.
        meaning: Kind of the events.
        source: URL of the definition.
    """

    names: tuple[str, ...]
    of: str
    meaning: Meaning
    source: str


CATEGORIES = (
    Category(("kernel",), "CUDA, ROCm, XPU, HPU, PrivateUse1", "kernel", _KINETO),
    Category(("gpu_memcpy", "gpu_memset"), "CUDA, ROCm, XPU, PrivateUse1", "copy", _KINETO),
    Category(("Kernel",), "CUDA, older torch (seen: 1.9)", "kernel", _OLD),
    Category(("Memcpy", "Memset"), "CUDA, older torch (seen: 1.9)", "copy", _OLD),
    Category(("mtia_ccp_events",), "MTIA", "kernel", _HTA),
    Category(
        ("gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range"),
        "CUDA, ROCm",
        "on device, no work",
        _KINETO,
    ),
    Category(("xpu_sync", "xpu_scope_profiler"), "XPU", "on device, no work", _XPU),
    Category(("mtia_insight", "mtia_counters"), "MTIA", "on device, no work", _KINETO),
    Category(("hardware_counters",), "CUDA", "on device, no work", _KINETO),
    Category(("cpu_op",), "every torch", "host", _KINETO),
    Category(("Operator", "Runtime"), "older torch (seen: 1.9)", "host", _OLD),
    Category(("cuda_runtime", "cuda_driver"), "CUDA, ROCm", "host", _KINETO),
    Category(("xpu_runtime", "xpu_driver"), "XPU", "host", _KINETO),
    Category(("hpu_op",), "HPU", "host", _GAUDI),
    Category(("mtia_runtime", "glow_runtime"), "MTIA, Glow", "host", _KINETO),
    Category(("privateuse1_runtime", "privateuse1_driver"), "PrivateUse1", "host", _KINETO),
    Category(("*_memcpy", "*_memset"), "any other vendor, as MLU", "copy", _MLU),
    Category(("*_runtime", "*_driver"), "any other vendor, as MLU", "host", _MLU),
    Category(
        ("*_user_annotation", "*_sync", "*_profiler_range"),
        "any other vendor, as MLU",
        "on device, no work",
        _MLU,
    ),
    Category(("collective_comm",), "XPU", "collective on the host", _XPU),
    Category(("Communication",), "older torch (not seen here)", "collective on the host", _OLD),
    Category(
        ("user_annotation", "python_function", "Python", "cpu_instant_event", "overhead", "Trace"),
        "every torch",
        "no work",
        _KINETO,
    ),
    Category(("external_correlation", "ProfilerStep", "Module", "Memory"), "torch", "no work", _OLD),
    Category(("enqueue", "dequeue"), "Ascend NPU", "no work", _NPU),
)
"""All known categories."""

_MEANINGS = {name: category.meaning for category in CATEGORIES for name in category.names}
_NOT_OF_A_PROCESS = ("Trace", "overhead")  # categories of kineto's own marks
_LAUNCHES = ("ac2g", "async")  # arrows from a call on the host to its kernel


@lru_cache(maxsize=1024)
def meaning_of(category: str) -> Meaning | None:
    """Return the kind of a category's events; ``None`` if the category is unknown."""
    of_any = (
        meaning for name, meaning in _MEANINGS.items() if name[0] == "*" and category.endswith(name[1:])
    )
    return _MEANINGS.get(category) or next(of_any, None)


def is_on_device(event: Event) -> bool:
    """Return whether an event is on a device's lane: a device event, or the head of a launch arrow."""
    if event.ph == "f" and event.cat in _LAUNCHES:
        return True
    return meaning_of(event.cat) in ("kernel", "copy", "on device, no work")


def is_host(event: Event) -> bool:
    """Return whether an event is from a process that runs code on the host."""
    on_host = meaning_of(event.cat) in ("host", "collective on the host", "no work")
    return on_host and event.cat not in _NOT_OF_A_PROCESS
