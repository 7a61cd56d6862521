"""Which device a process computes on, and what may keep torch from recording its kernels.

Nothing here starts a device: a process that has not used one says so.
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
"""A value that is set, so that no start-up hook fills it in, and that NVTX cannot load."""

_VARIABLES = {
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
_UUID = re.compile(r"(?:gpu-)?((?:mig-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


def used_devices() -> list[Device]:
    """Return the accelerators that this process has used; empty if none, or if nothing says so."""
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
        logger.debug("the devices of this process are not known: %s: %s", type(error).__name__, error)
        return []
    return found


def given_devices() -> list[Device]:
    """Return the accelerators that Ray reserved for this process, which may compute on a CPU.

    Not while the process exits: Ray, which is asked, would not answer any more.
    """
    ray: Any = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return []
        given = ray.get_runtime_context().get_accelerator_ids()
        ids = next((ids for ids in given.values() if ids), ())
        return [_device("cpu", index, str(id)) for index, id in enumerate(ids)]
    except Exception as error:
        logger.debug("Ray does not say what it gave this process: %s: %s", type(error).__name__, error)
        return []


def engine_devices(kind: str, ranks: int, numbers: Sequence[int], ids: Sequence[str] | None) -> list[Device]:
    """Return the devices of an engine that computes in processes of its own, in order of rank.

    Args:
        kind: What the engine runs on.
        ranks: Number of its ranks.
        numbers: Which of the engine's devices each of its first ranks uses; nothing is known of the others.
        ids: The engine's devices, numbers on this host or UUIDs; ``None`` for those that this process's
            environment leaves visible, in which case an engine on CPUs has none.
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
    """Return what is wrong with this process's environment, and the remedy; empty if nothing is.

    CUPTI serves one subscriber in a process. Some images point NVTX at libcupti, which then subscribes at
    the first NVTX range; torch's profiler comes later, is refused, and records the host alone.
    """
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
