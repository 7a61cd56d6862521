"""Which memory of a process is read, and that reading it makes no device
of a process's begin to work.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from verl_profiling.files import device_use
from verl_profiling.files.machine import process_peak_bytes
from verl_profiling.watch.stage_memory import LONG_NS, StageMemory

STATISTICS = {
    "allocated_bytes": {"all": {"current": 3, "peak": 7}, "small_pool": {"current": 1, "peak": 1}},
    "reserved_bytes": {"all": {"current": 4, "peak": 8}},
}


@pytest.fixture(autouse=True)
def no_device_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_use, "_index", None)
    device_use._name_of.cache_clear()


def process_memory() -> tuple[int, int]:
    """Return peak and held memory after a long stage."""
    return StageMemory().ended("update_actor", 0, LONG_NS)


def initialises(*_: object) -> NoReturn:
    """Stand for what would make a context on a device."""
    pytest.fail("the device was made to begin to work")


def fails(*_: object) -> NoReturn:
    raise RuntimeError("an illegal memory access was encountered")


def device(initialised: bool, statistics: Any = initialises) -> SimpleNamespace:
    if not callable(statistics):
        found = statistics
        statistics = lambda index: found  # noqa: E731
    memory = SimpleNamespace(memory_stats_as_nested_dict=statistics)
    return SimpleNamespace(
        is_initialized=lambda: initialised,
        memory=memory,
        init=initialises,
        current_device=initialises if statistics is initialises else lambda: 0,
        device_count=lambda: 1,
    )


def is_of_the_host(found: tuple[int, int]) -> bool:
    """Return whether these are the marks of this process's resident memory."""
    peak, held = found
    return 1_000_000 < held <= peak <= process_peak_bytes()


@pytest.mark.parametrize(
    "torch",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(cuda=device(False), npu=device(False)),
        SimpleNamespace(cuda=device(True, {"allocated_bytes": {}})),
        SimpleNamespace(cuda=device(True, fails)),
    ],
    ids=["no torch", "no device", "not begun", "nothing said", "fails"],
)
def test_a_process_that_uses_no_device_tells_of_the_host(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never began to is not made to; nor does a device that fails,
    or another torch, do harm.
    """
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert is_of_the_host(process_memory())


@pytest.mark.parametrize(
    "devices",
    [
        {"cuda": device(False), "npu": device(True, STATISTICS)},
        {"npu": device(True, STATISTICS), "cuda": device(True)},
    ],
    ids=["npu", "the first of both"],
)
def test_a_process_that_uses_a_device_tells_of_that(
    devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**devices))
    assert process_memory() == (7, 3)


def test_the_real_torch_is_not_initialised_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a GPU in the machine: ``torch.cuda`` is asked whether it is,
    and nothing else.
    """
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("this process uses its GPU")
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialises)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", initialises)
    assert is_of_the_host(process_memory())
    assert not torch.cuda.is_initialized()
