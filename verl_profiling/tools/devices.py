"""Finds the devices of a process, and obstacles to recording kernels with torch.

No function initializes a device; a process that has used no device has none.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from verl_profiling.manifest import Device

logger = logging.getLogger(__name__)

VARIABLE = "NVTX_INJECTION64_PATH"
NO_INJECTION = "/nonexistent/verl-profiling-no-nvtx-injection.so"
"""A path that NVTX cannot load; a set value also keeps start-up hooks from setting the variable."""

_VARIABLES = {
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
_UUID = re.compile(r"(?:gpu-)?((?:mig-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


def used_devices() -> list[Device]:
    """Return the accelerators that this process has used, as far as known."""
    torch: Any = sys.modules.get("torch")
    found: list[Device] = []
    try:
        for kind in ("npu", "cuda", "xpu"):
            module = getattr(torch, kind, None)
            if module is None or not module.is_initialized():
                continue
            visible = _visible(kind)
            for index in range(module.device_count()):
                if index == module.current_device() or module.memory_reserved(index):
                    id = visible[index] if index < len(visible) else str(index)
                    uuid = str(getattr(module.get_device_properties(index), "uuid", ""))
                    device = _device(kind, index, id)
                    found.append(msgspec.structs.replace(device, uuid=_uuid(uuid) or device.uuid))
            break
    except Exception as error:  # of a driver or a device, whose state nobody here has caused
        logger.debug("the devices of this process are unknown: %s: %s", type(error).__name__, error)
        return []
    return found


def engine_devices(
    kind: str, ranks: int, numbers: Sequence[int], ids: Sequence[str] | None
) -> list[Device]:
    """Return the devices of an engine that computes in processes of its own, in order of rank.

    Args:
        kind: Device type of the engine.
        ranks: Number of ranks of the engine.
        numbers: Device number of each of the engine's first ranks; the devices of other ranks are
            unknown.
        ids: Numbers (on this host) or UUIDs of the engine's devices; ``None`` for the visible
            devices of this process. Then an engine on CPUs has none.
    """
    visible = (() if kind == "cpu" else _visible(kind)) if ids is None else ids
    every = ids is None and not visible and kind != "cpu"
    known = [Device(kind=kind)] * ranks
    for rank, number in enumerate(numbers[:ranks]):
        if every or number < len(visible):
            known[rank] = _device(kind, number, str(number) if every else visible[number])
    return known


def _visible(kind: str) -> tuple[str, ...]:
    value = next(filter(None, map(os.environ.get, _VARIABLES.get(kind, ()))), "")
    return tuple(id.strip() for id in value.split(",") if id.strip())


def _device(kind: str, index: int, id: str) -> Device:
    place = f"{socket.gethostname()}/{id}" if id.isdecimal() else ""
    return Device(kind=kind, index=index, uuid=_uuid(id), place=place)


def _uuid(text: str) -> str:
    found = _UUID.fullmatch(text.strip().lower())
    return found[1] if found else ""


def injected_cupti() -> str:
    """Return a sentence with the remedy if the environment makes NVTX load CUPTI; else ``""``.

    CUPTI serves one subscriber per process. In some images, NVTX loads libcupti, which subscribes
    at the first NVTX range. Then torch's profiler is refused later, and records only the host.
    """
    path = os.environ.get(VARIABLE, "")
    if "cupti" not in PurePath(path).name.lower():
        return ""
    return (
        f"{VARIABLE}={path} makes NVTX the only subscriber of CUPTI, so torch records no kernels; "
        f"set {VARIABLE}={NO_INJECTION} where workers are started"
    )


def lost_kernels() -> str:
    """Return the possible reason why torch recorded no event of a device."""
    return injected_cupti() or (
        "another profiler may hold CUPTI (Nsight Systems, a monitor of the node, an NVTX library "
        f"named by {VARIABLE}), or nothing ran there"
    )
