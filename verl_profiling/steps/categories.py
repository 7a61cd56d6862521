"""The table of the categories of trace events, for all accelerators; the documentation prints the
table.

Any other category is unknown. Device events of unknown category are shown as unrecognised work of
the device (see :mod:`~verl_profiling.steps.kinds`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from verl_profiling.steps.trace import Event

Meaning = Literal[
    "kernel", "copy", "on device, no work", "host", "collective on the host", "no work"
]


class Category(NamedTuple):
    """The meaning of one or several categories.

    Attributes:
        names: The categories; ``*`` stands for the name of any vendor.
        of: Accelerators, or versions of torch, whose traces have the categories.
        meaning: Kind of the events.
    """

    names: tuple[str, ...]
    of: str
    meaning: Meaning


CATEGORIES = (
    # pytorch/kineto: libkineto/include/ActivityType.h
    Category(("kernel",), "CUDA, ROCm, XPU, HPU, PrivateUse1", "kernel"),
    # facebookresearch/HolisticTraceAnalysis: hta/common/types.py
    Category(("mtia_ccp_events",), "MTIA", "kernel"),
    Category(
        ("gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range"),
        "CUDA, ROCm",
        "on device, no work",
    ),
    # pytorch/kineto: libkineto/src/plugin/xpupti
    Category(("xpu_sync", "xpu_scope_profiler"), "XPU", "on device, no work"),
    Category(("mtia_insight", "mtia_counters"), "MTIA", "on device, no work"),
    Category(("hardware_counters",), "CUDA", "on device, no work"),
    Category(("cpu_op",), "every torch", "host"),
    Category(("hpu_op",), "HPU", "host"),  # HabanaAI/gaudi-pytorch-bridge
    # MLU: Cambricon/torch_mlu, third_party/kineto_mlu/libkineto/src/ActivityType.cpp
    Category(
        ("*_memcpy", "*_memset"), "CUDA, ROCm, XPU, PrivateUse1, any other vendor, as MLU", "copy"
    ),
    Category(
        ("*_runtime", "*_driver"),
        "CUDA, ROCm, XPU, MTIA, PrivateUse1, any other vendor, as MLU",
        "host",
    ),
    Category(
        ("*_user_annotation", "*_sync", "*_profiler_range"),
        "any other vendor, as MLU",
        "on device, no work",
    ),
    Category(("collective_comm",), "XPU", "collective on the host"),
    Category(
        ("user_annotation", "python_function", "Python", "cpu_instant_event", "overhead", "Trace"),
        "every torch",
        "no work",
    ),
    Category(("external_correlation", "ProfilerStep", "Module", "Memory"), "torch", "no work"),
    # Ascend/pytorch: torch_npu/profiler/analysis
    Category(("enqueue", "dequeue"), "Ascend NPU", "no work"),
)
"""All known categories."""

ENGINE_ITERATION = re.compile(r"step\[|execute_\w*\d", re.ASCII)
"""Begins of the annotations of iterations by SGLang and vLLM."""

_MEANINGS = {name: category.meaning for category in CATEGORIES for name in category.names}
_NOT_OF_A_PROCESS = ("Trace", "overhead")  # categories of kineto's own marks
_LAUNCHES = ("ac2g", "async")  # arrows from a call on the host to its kernel


@lru_cache(maxsize=1024)
def meaning_of(category: str) -> Meaning | None:
    """Return the kind of a category's events; ``None`` if the category is unknown."""
    of_any = (
        meaning
        for name, meaning in _MEANINGS.items()
        if name[0] == "*" and category.endswith(name[1:])
    )
    return _MEANINGS.get(category) or next(of_any, None)


def is_on_device(event: Event) -> bool:
    """Return whether an event belongs to a device: a device event,
    or the head of a launch arrow.
    """
    if event.ph == "f" and event.cat in _LAUNCHES:
        return True
    return meaning_of(event.cat) in ("kernel", "copy", "on device, no work")


def is_host(event: Event) -> bool:
    """Return whether an event belongs to a process on the host."""
    on_host = meaning_of(event.cat) in ("host", "collective on the host", "no work")
    return on_host and event.cat not in _NOT_OF_A_PROCESS
