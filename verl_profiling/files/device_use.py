"""Memory of the device of a process: what is free, and what torch's allocator holds of it.

No reading waits for the device, or begins to use one. A process has one device here: the first one
on which its allocator holds something.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.files.machine import used_devices
from verl_profiling.manifest import Count, Ns

PARTS = ("optimizer", "gradients", "parameters")
"""Parts of what a process has allocated; the first ones are offloaded most easily."""

_KINDS = ("npu", "cuda")  # modules of torch with an allocator that counts
_DEPTH = 3  # verl 0.9: worker.actor.engine.optimizer
_MOST_CHUNKS = 16  # of a list of modules; Megatron has one for each virtual stage of a pipeline

_index: int | None = None


class DeviceUse(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A reading of a device and of this process on it, in bytes.

    Attributes:
        at_ns: Time of the reading (unix ns).
        device: UUID of the device, else its place, as of :class:`verl_profiling.manifest.Device`.
        kind: ``cuda`` or ``npu``.
        free_bytes: Free memory of the device, for all processes.
        total_bytes: Memory of the device; 0 if both are unknown.
        allocated_bytes: What tensors of this process have.
        reserved_bytes: What torch's allocator of this process holds.
        peak_bytes: Peak of ``allocated_bytes`` since the begin of the process or a reset of torch's
            peak statistics.
        parts: What modules and optimizers of the process's workers have on the device, by part.
    """

    at_ns: Ns
    device: str
    kind: str
    free_bytes: Count
    total_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count
    peak_bytes: Count
    parts: dict[str, Count] = {}


def device_use() -> DeviceUse | None:
    """Return the use of this process's device; ``None`` if it has used none."""
    torch = sys.modules.get("torch")
    for kind in _KINDS:
        module = getattr(torch, kind, None)
        with suppress(Exception):  # another torch, or a failed device; training reports it
            if module is not None and module.is_initialized():
                return _use_of(kind, module)
    return None


def _use_of(kind: str, module: Any) -> DeviceUse | None:
    global _index
    # Threads begin with device 0, so that only the first reading looks for the process's device.
    indices = [_index]
    if _index is None:
        indices = [module.current_device(), *range(module.device_count())]
    for index in indices:
        statistics = module.memory.memory_stats_as_nested_dict(index)
        reserved = statistics["reserved_bytes"]["all"]["current"]
        if index == _index or reserved:
            break
    else:
        return None
    _index = index
    free = total = 0
    with suppress(Exception):  # a platform without it
        free, total = module.mem_get_info(index)
    allocated = statistics["allocated_bytes"]["all"]
    return DeviceUse(
        at_ns=clock.now_ns(),
        device=_name_of(index),
        kind=kind,
        free_bytes=free,
        total_bytes=total,
        allocated_bytes=allocated["current"],
        reserved_bytes=reserved,
        peak_bytes=allocated["peak"],
    )


@cache
def _name_of(index: int) -> str:
    for device in used_devices():
        if device.index == index:
            return device.uuid or device.place
    return ""


def parts_of(owners: Iterable[Callable[[], object]], kind: str) -> dict[str, int]:
    """Return the bytes on devices of a kind of parameters, gradients and states of optimizers.

    Args:
        owners: Functions that return objects, whose attributes, and attributes of these, are
            modules and optimizers of torch; or ``None``.
        kind: Kind of the device, e.g. ``cuda``.
    """
    torch = sys.modules["torch"]
    modules, optimizers = [], []
    for each in _attributes([owner() for owner in owners]):
        if isinstance(each, torch.nn.Module):
            modules.append(each)
        elif isinstance(each, torch.optim.Optimizer):
            optimizers.append(each)
    parameters = [*chain.from_iterable(module.parameters() for module in modules)]
    states = chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
    gradients = [parameter.grad for parameter in parameters]
    values = chain.from_iterable(state.values() for state in states)
    seen: set[int] = set()  # tied weights have one storage, and so do views of a flat parameter
    return {
        name: _size_of(tensors, torch.Tensor, kind, seen)
        for name, tensors in zip(PARTS, (values, gradients, parameters), strict=True)
    }


def _attributes(objects: list[object]) -> Iterator[object]:
    """Yield objects, their attributes, and the attributes' attributes. Attributes of objects with a
    type of torch, or a builtin type, are left out.
    """
    seen: set[int] = set()
    for _ in range(_DEPTH + 1):
        inside: list[object] = []
        for each in objects:
            if id(each) in seen:
                continue
            seen.add(id(each))
            yield each
            if isinstance(each, list):
                inside += each[:_MOST_CHUNKS]
            elif type(each).__module__.partition(".")[0] not in ("torch", "builtins"):
                inside += getattr(each, "__dict__", {}).values()
        objects = inside


def _size_of(tensors: Iterable[Any], tensor: type, kind: str, seen: set[int]) -> int:
    total = 0
    for each in tensors:
        local = getattr(each, "_local_tensor", each)  # a rank's part of a DTensor
        if isinstance(local, tensor) and local.device.type == kind:  # type: ignore[attr-defined]
            storage = local.untyped_storage()  # type: ignore[attr-defined]
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total
