"""Calls of a device's runtime that say why the device has nothing to do.

Names: CUDA's runtime and driver API, HIP's, which mirror them, and AscendCL's (``aclrtMemcpy``,
``aclrtSynchronizeStream``). An asynchronous copy returns once it is launched, but from pageable memory it
blocks ("API synchronization behavior" in the CUDA Runtime API), so it counts where it takes long.
"""

from __future__ import annotations

import re

__all__ = ["blocks_from_ns", "launches_graph"]

LONG_COPY_NS = 100_000
"""Launching a copy takes some ten microseconds."""

_LIBRARY = r"(?:AscendCL@)?(?:cuda|cu|hip|aclrt)"
_BLOCKING = re.compile(
    _LIBRARY + r"(?:Memcpy|Malloc|Free|MemAlloc|MemFree|HostAlloc|HostRegister|\w*Synchronize)"
)
_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


def blocks_from_ns(name: str) -> int | None:
    """Return from which duration a call that copies, allocates or waits blocks; ``None`` for others."""
    if not _BLOCKING.match(name):
        return None
    if "Async" not in name:
        return 0
    return LONG_COPY_NS if "Memcpy" in name else None


def launches_graph(name: str) -> bool:
    """Return whether a call launches a graph of kernels."""
    return _GRAPH_LAUNCH.match(name) is not None
