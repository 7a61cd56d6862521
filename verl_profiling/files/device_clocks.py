"""Clocks of the NVIDIA devices of this machine, and why they are low, from NVML.

A call of NVML may take long where a device fails. So one process of the machine reads it: ``python
-m verl_profiling.files.device_clocks FILE``. It ends with the process that started it, and then
another watched process starts a new one.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.files.opener import UNDECODABLE, appended, read_small
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.manifest import Count

_PAUSE_S = 1.0
_STALE_S = 5.0  # without a new reading for so long, the reading process has ended
_MODULE = "pynvml"

_IDLE = 0x01
_WHY = {
    0x20 | 0x40: "its temperature",
    0x80: "the power brake of its machine",
    0x08: "its hardware",
    0x04: "its power limit",
}
"""Bits of NVML's reasons for a low clock that slow a busy device, and what they say.

A clock that a person has set, and one that is synchronised with other boards, are no throttling.
"""


class DeviceClock(msgspec.Struct, frozen=True, array_like=True):
    """A reading of a device.

    Attributes:
        mhz: Clock of its multiprocessors.
        most_mhz: Their highest clock.
        reasons: NVML's bits on why the clock is not the highest one.
    """

    mhz: Count
    most_mhz: Count
    reasons: Count

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs on the device, so that its clock is low."""
        return bool(self.reasons & _IDLE)

    @property
    def why(self) -> str:
        """Cause of the throttling; empty for none."""
        return next((why for bits, why in _WHY.items() if bits & self.reasons), "")


class _File(msgspec.Struct):
    """The readings by UUID of the device, without ``GPU-``."""

    clocks: dict[str, DeviceClock]


class Clocks:
    """The last readings of the devices of this machine.

    Args:
        path: File of the readings; its lock is beside it.
    """

    def __init__(self, path: Path | None = None) -> None:
        folder = Path(tempfile.gettempdir())
        self._path = path or folder / f"verl-profiling-clocks-{os.getuid()}.json"
        self._reader: subprocess.Popen[bytes] | None = None
        self._started_s = -_STALE_S
        self._can_start = importlib.util.find_spec(_MODULE) is not None

    def of(self, uuid: str) -> DeviceClock | None:
        """Return the last reading of a device; ``None`` if unknown."""
        age_s = _STALE_S
        with suppress(OSError):
            age_s = time.time() - self._path.stat().st_mtime
        if age_s >= _STALE_S:
            self._start()
            return None
        with suppress(OSError, *UNDECODABLE):
            return msgspec.json.decode(read_small(self._path), type=_File).clocks.get(uuid)
        return None

    def end(self) -> None:
        """End the reading process, if this process has started it."""
        if self._reader is not None and self._reader.stdin is not None:
            self._reader.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # a call of NVML does not return
                self._reader.wait(_PAUSE_S)

    def _start(self) -> None:
        """Start a reading process, unless it runs, was tried a moment ago, or NVML has failed."""
        now_s = time.monotonic()
        if self._reader is not None:
            status = self._reader.poll()
            if status is None:  # it starts, or a call of NVML does not return
                return
            self._can_start = status == 0
        if now_s - self._started_s < _STALE_S or not self._can_start:
            return
        self._started_s = now_s
        with suppress(OSError):
            self._reader = subprocess.Popen(
                [sys.executable, "-m", __name__, self._path],
                stdin=subprocess.PIPE,  # it ends as this process closes it, however that ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def unread_clocks() -> str:
    """Return why the clocks of devices are unknown on this machine; empty if they are not."""
    if importlib.util.find_spec(_MODULE) is None:
        return "no nvidia-ml-py: a throttled device is not told (extra nvml)"
    try:
        nvml = _initialised()
        for _ in _readings(nvml):
            pass
    except Exception as error:
        return f"NVML: {error}: a throttled device is not told"
    return ""


def _initialised() -> Any:
    nvml = importlib.import_module(_MODULE)
    nvml.nvmlInit()
    return nvml


def _readings(nvml: Any) -> Iterator[tuple[str, DeviceClock]]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-")
        # The new name of this function, ...EventReasons, is unknown to drivers before 535.
        yield (
            uuid,
            DeviceClock(
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            ),
        )


def main(path: Path) -> None:
    """Write the readings of all devices once a second, if no other process does."""
    with appended(path.with_suffix(".lock")) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        nvml = _initialised()
        while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
            write_json_atomically(path, _File(dict(_readings(nvml))), durable=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
