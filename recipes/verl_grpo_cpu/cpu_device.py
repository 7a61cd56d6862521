"""The interface that verl expects of a ``torch.<device>`` module, for the CPU.

``torch.cpu`` has streams and events but no memory statistics; verl asks for both. Names that are
not defined here come from ``torch.cpu``.
"""

from __future__ import annotations

from typing import Any

import torch

_GIB = 1 << 30


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)


def is_available() -> bool:
    """Return true: there is always a CPU."""
    return True


def device_count() -> int:
    """Return 1: a process computes on one device, and the CPU cannot be divided."""
    return 1


def current_device() -> int:
    """Return the index of the only device."""
    return 0


def set_device(device: int | torch.device) -> None:
    """Do nothing: there is one device."""


def synchronize(device: int | torch.device | None = None) -> None:
    """Do nothing: the CPU computes synchronously."""


def get_device_name(device: int | torch.device | None = None) -> str:
    """Return the name that verl looks up peak FLOPS by; unknown on purpose."""
    return "cpu"


def manual_seed(seed: int) -> None:
    """Seed torch's generator, which is the CPU's."""
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: int | torch.device | None = None) -> torch.Tensor:
    """Return the state of torch's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: int | torch.device | None = None) -> None:
    """Set the state of torch's generator."""
    torch.set_rng_state(state)


def empty_cache() -> None:
    """Do nothing: the CPU allocator caches nothing that could be given back."""


def ipc_collect() -> None:
    """Do nothing: no memory is shared with other processes."""


def mem_get_info(device: int | torch.device | None = None) -> tuple[int, int]:
    """Return (free, total) bytes, round figures: verl only prints them."""
    return 8 * _GIB, 16 * _GIB


def memory_allocated(device: int | torch.device | None = None) -> int:
    """Return 0: torch does not count the CPU's memory."""
    return 0


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def reset_peak_memory_stats(device: int | torch.device | None = None) -> None:
    """Do nothing: nothing is counted."""
