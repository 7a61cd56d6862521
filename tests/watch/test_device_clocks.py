"""Clocks of NVIDIA devices: a stand-in of NVML's Python package, and a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from quiet_steps import summary

from verl_profiling.cli import main
from verl_profiling.files.device_clocks import Clocks, DeviceClock
from verl_profiling.files.host_use import MachineUse, ProcessUse
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.sign_tests import Detector

UUID = "6ae1ee18-5f0e-4e0b-bd0e-4d1c5ad4e3a1"
NVML = """
import os
NVML_CLOCK_SM = 1
class NVMLError(Exception): pass
def nvmlInit():
    with open(os.environ["STARTS"], "a") as file:
        print(os.getpid(), file=file)
    if "BROKEN" in os.environ:
        raise NVMLError("Insufficient Permissions")
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return "GPU-%s" if handle else "GPU-other"
def nvmlDeviceGetClockInfo(handle, type): return [1980, 1095][handle] * (type == NVML_CLOCK_SM)
def nvmlDeviceGetMaxClockInfo(handle, type): return 1980 * (type == NVML_CLOCK_SM)
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return [0, 0x40 | 0x8][handle]
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in is on the path, and writes down which processes initialise it."""
    (tmp_path / "pynvml.py").write_text(NVML % UUID)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "pynvml")
    return tmp_path / "starts"


def read(clocks: Clocks) -> DeviceClock | None:
    for _ in range(600):
        found = clocks.of(UUID)
        if found is not None:
            return found
        time.sleep(0.1)
    return None


def test_one_other_process_reads_for_all(starts: Path, tmp_path: Path) -> None:
    first, second = Clocks(tmp_path / "clocks.json"), Clocks(tmp_path / "clocks.json")
    assert read(first) == DeviceClock(1095, 1980, 0x48)
    clock = read(second)
    assert clock is not None
    assert (clock.why, clock.is_idle) == ("its temperature", False)
    assert first.of("a neighbour's") is None
    [reader] = starts.read_text().split()
    assert int(reader) != os.getpid()
    first.end()
    second.end()


def test_without_access_nothing_is_tried_again(
    starts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``doctor`` has one line on it, and no error."""
    monkeypatch.setenv("BROKEN", "1")
    monkeypatch.setattr("verl_profiling.files.device_clocks._STALE_S", 0.5)
    clocks = Clocks(tmp_path / "clocks.json")
    deadline = time.monotonic() + 60
    while not starts.exists() and time.monotonic() < deadline:
        assert clocks.of(UUID) is None
        time.sleep(0.1)
    for _ in range(30):
        clocks.of(UUID)
        time.sleep(0.1)
    assert len(starts.read_text().split()) == 1
    assert main(["doctor", "--json"]) == 0
    rows = {row["subject"]: row for row in json.loads(capsys.readouterr().out)["machine"]}
    assert rows["device clocks"]["problem"] is False
    said = "NVML: Insufficient Permissions: a throttled device is not told"
    assert rows["device clocks"]["state"] == said


def test_a_slow_process_whose_device_is_throttled() -> None:
    """More than those of its peers; idle ones do not count, as their clocks are low."""
    clocks = {
        "actor_rank0": DeviceClock(1980, 1980, 0),
        "actor_rank1": DeviceClock(345, 1980, 0x1),
        "actor_rank2": DeviceClock(1965, 1980, 0x4),
        "actor_rank3": DeviceClock(1095, 1980, 0x40),
    }
    detector = Detector(Anomaly())
    found = []
    for number in range(1, 10):
        slow = summary(number, slow={"actor_rank3": 1.6})
        for use in slow.workers:
            of_process = ProcessUse(at_ns=number, clock=clocks.get(use.lane))
            slow.workers[slow.workers.index(use)] = replace(
                use, host_use=(of_process, MachineUse(host="node7"))
            )
        found.append(detector.observe(slow))
    [one] = [one for one in found if one is not None]
    assert one.reason.endswith(
        "; the device of actor_rank3 ran at 1,095 MHz (others: 1,972): it is throttled by its "
        "temperature"
    )


def test_the_real_package_has_what_is_called() -> None:
    nvml = pytest.importorskip("pynvml")
    for name in ("Count", "HandleByIndex", "UUID", "ClockInfo", "MaxClockInfo"):
        assert callable(getattr(nvml, f"nvmlDeviceGet{name}"))
    assert callable(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    assert nvml.NVML_CLOCK_SM == 1
    assert nvml.nvmlClocksThrottleReasonHwThermalSlowdown == 0x40
    assert nvml.nvmlClocksThrottleReasonSwThermalSlowdown == 0x20
    assert nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x80
    assert nvml.nvmlClocksThrottleReasonHwSlowdown == 0x08
    assert nvml.nvmlClocksThrottleReasonSwPowerCap == 0x04
    assert nvml.nvmlClocksThrottleReasonGpuIdle == 0x01
