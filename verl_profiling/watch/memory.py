"""How much memory a process has: of its device, or of the host where it uses none."""

from __future__ import annotations

import sys
from typing import Any

from verl_profiling.tools.process_memory import own_bytes, process_peak_bytes

_DEVICES = ("cuda", "npu")


def process_memory() -> tuple[int, int]:
    """Return the most bytes that this process has had and the bytes that it has; 0 for what is not known.

    Of a device it is what torch's allocator has handed out, and the highest that this was since the process
    began, or since the program reset torch's mark. On the host it is the resident memory of this process
    alone, and the kernel's mark of all that was resident. No mark is reset here, and nothing is imported.
    """
    torch = sys.modules.get("torch")
    for name in _DEVICES:
        device = getattr(torch, name, None)
        if device is not None and (found := _of_device(device)) is not None:
            return found
    return process_peak_bytes(), own_bytes() or 0


def _of_device(device: Any) -> tuple[int, int] | None:
    """Return the same of one kind of device; ``None`` if this process does not use it."""
    try:
        if not device.is_initialized():
            return None
        statistics = device.memory.memory_stats_as_nested_dict()
        allocated = statistics["allocated_bytes"]["all"]
        return allocated["peak"], allocated["current"]
    except Exception:  # a device of another torch, or one that has failed: training says so itself
        return None
