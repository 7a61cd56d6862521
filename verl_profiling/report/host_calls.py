"""Calls of a device's runtime that say why the device has nothing to do.

Names: CUDA runtime and driver API ("Graph Management", "Memory Management", "API synchronization behavior"),
the HIP runtime API that mirrors them, and AscendCL (``aclrtMemcpy``, ``aclrtSynchronizeStream``).
A copy from pageable memory blocks its caller although its name ends in ``Async``.
"""

from __future__ import annotations

import re

__all__ = ["blocks", "launches_graph"]

_BLOCKING = re.compile(
    r"(?:cuda|cu|hip|aclrt)(?:Memcpy|Memset|Malloc|Free|Synchronize|(?:Device|Ctx|Stream|Event)Synchronize)"
)
_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


def blocks(name: str) -> bool:
    """Return whether a call may return only when the device is done, or when memory is copied or found."""
    return _BLOCKING.match(name) is not None


def launches_graph(name: str) -> bool:
    """Return whether a call launches a graph of kernels."""
    return _GRAPH_LAUNCH.match(name) is not None
