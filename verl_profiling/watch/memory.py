"""Memory of a process: of its device, or of the host if it uses no device."""

from __future__ import annotations

import sys
from typing import Any

from verl_profiling.tools.process_memory import own_bytes, process_peak_bytes

_DEVICES = ("cuda", "npu")


def process_memory() -> tuple[int, int]:
    """Return peak and current memory of this process, in bytes; 0 for an unknown value.

    On a device: the bytes that torch's allocator has allocated, and their peak since the process began or the
    program reset torch's peak statistics. On the host: the resident memory of this process without shared
    pages, and the kernel's peak of all its resident memory. Nothing is reset or imported here.
    """
    torch = sys.modules.get("torch")
    for name in _DEVICES:
        device = getattr(torch, name, None)
        if device is not None and (found := _of_device(device)) is not None:
            return found
    return process_peak_bytes(), own_bytes() or 0


def _of_device(device: Any) -> tuple[int, int] | None:
    """Return peak and current bytes of one kind of device; ``None`` if this process does not use it."""
    try:
        if not device.is_initialized():
            return None
        statistics = device.memory.memory_stats_as_nested_dict()
        allocated = statistics["allocated_bytes"]["all"]
        return allocated["peak"], allocated["current"]
    except Exception:  # another version of torch, or a failed device, which training reports itself
        return None
