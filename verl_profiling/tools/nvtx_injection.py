"""Whether NVTX has taken the place in CUPTI that torch needs to record kernels.

CUPTI serves one subscriber in a process. Some images point NVTX at libcupti, which then subscribes at the
first NVTX range of a process; torch's profiler comes later, is refused, and records the host alone.
"""

from __future__ import annotations

import os
from pathlib import PurePath

__all__ = ["NO_INJECTION", "VARIABLE", "injected_cupti", "lost_kernels"]

VARIABLE = "NVTX_INJECTION64_PATH"
NO_INJECTION = "/nonexistent/verl-profiling-no-nvtx-injection.so"
"""A value that is set, so that no start-up hook fills it in, and that NVTX cannot load."""


def injected_cupti() -> str:
    """Return what is wrong with this process's environment, and the remedy; empty if nothing is."""
    path = os.environ.get(VARIABLE, "")
    if "cupti" not in PurePath(path).name.lower():
        return ""
    return (
        f"{VARIABLE}={path} has NVTX take CUPTI, which serves one subscriber, and torch then records no "
        f"kernels; set {VARIABLE}={NO_INJECTION} where workers are started"
    )


def lost_kernels() -> str:
    """Return what may have kept torch from recording a device, as far as this process can see."""
    return injected_cupti() or (
        "another profiler may hold CUPTI (Nsight Systems, a monitor of the node, an NVTX library named by "
        f"{VARIABLE}), or nothing ran there"
    )
