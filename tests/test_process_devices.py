"""Which device a process or an engine computes on: by UUID, by place, and honestly unknown."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from verl_profiling.files.machine import engine_devices, used_devices
from verl_profiling.manifest import Device

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
HOST = socket.gethostname()


class Cuda:
    """Stands for ``torch.cuda`` with two devices, of which the process uses one or both."""

    def __init__(self, used: tuple[int, ...], initialized: bool = True) -> None:
        self._used, self._initialized = used, initialized

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        assert self._initialized, "a look at the device started it"
        return self._used[0]

    def memory_reserved(self, index: int) -> int:
        return 1 << 20 if index in self._used else 0

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"{index}{UUID[1:]}")


def torch_with(monkeypatch: pytest.MonkeyPatch, **kinds: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**kinds))  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_process_names_the_device_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID and number on the host; one that has not used its device has none."""
    torch_with(monkeypatch, cuda=Cuda(used=(1,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, 7")
    assert used_devices() == [Device(kind="cuda", index=1, uuid=f"1{UUID[1:]}", place=f"{HOST}/7")]
    torch_with(monkeypatch, cuda=Cuda(used=(0,), initialized=False))
    assert used_devices() == []


def test_an_engine_has_the_visible_devices_in_order_of_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of this host, from ``base_gpu_id`` on; on CPUs what its server is told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"5,GPU-{UUID.upper()},")
    first, second, third = engine_devices("cuda", 3, range(3), None)
    assert first == Device(kind="cuda", index=0, place=f"{HOST}/5")
    assert second == Device(kind="cuda", index=1, uuid=UUID)
    assert third == Device(kind="cuda"), "a rank on another node: where is not known"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert engine_devices("cpu", 1, range(1), None) == [Device(kind="cpu")]
    assert engine_devices("cpu", 1, range(1), ["0"]) == [
        Device(kind="cpu", index=0, place=f"{HOST}/0")
    ]
    assert engine_devices("cuda", 1, range(1), ["none"]) == [Device(kind="cuda", index=0)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = engine_devices("cuda", 4, range(2, 4), None)
    assert [device.place for device in found] == [f"{HOST}/6", f"{HOST}/7", "", ""]


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_amd_has_variables_of_its_own(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Else each replica would seem to compute on the first device."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "3")
    assert engine_devices("cuda", 1, range(1), None)[0].place == f"{HOST}/3"
