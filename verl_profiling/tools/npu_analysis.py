"""Runs torch_npu's analysis, which makes a recording readable, in a separate process.

The analysis forks the process that calls it, and changes how that process starts others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import folder_bytes

__all__ = ["analysed", "has_data"]

_ANALYSE = """\
import sys
from torch_npu.profiler.profiler import analyse
analyse(sys.argv[1], export_type=sys.argv[2].split(","))
"""
_RESULTS = "ASCEND_PROFILER_OUTPUT"
_DONE = "analyse.done"


def has_data(recorded: Path) -> bool:
    """Return whether torch_npu recorded anything into its folder, of the host or of the device."""
    return any(
        file.is_file() and file.stat().st_size
        for part in ("FRAMEWORK", "PROF_*")
        for found in recorded.glob(part)
        for file in found.rglob("*")
    )


def analysed(
    recorded: Path, artifact: Artifact, *, export: Sequence[str], deadline_s: float, device: bool
) -> Artifact:
    """Run torch_npu's analysis on a recording, unless that was done, and return the artifact with its result.

    A rollout engine may have analysed its recording itself. Where only the host was recorded that is done
    again, because torch_npu converts these times with the wrong clock.

    Args:
        recorded: The folder that torch_npu made, ``*_ascend_pt``.
        artifact: The recording's artifact.
        export: What the analysis writes, as torch_npu names it.
        deadline_s: Deadline, in seconds.
        device: Whether the device was to be recorded, so that its data must exist.
    """
    results = recorded / _RESULTS
    printed, problem = "", ""
    if not (device and (results / _DONE).exists()):
        _correct_clock(recorded)
        printed, problem = _run_analysis(recorded, export, deadline_s)
    trace = results / "trace_view.json"
    size = folder_bytes(recorded.parent)
    if problem or not trace.is_file():
        reason = (
            f"the analysis {problem or 'wrote no trace_view.json'}{_last_error(printed)}; raw data is kept"
        )
        return msgspec.structs.replace(artifact, status="failed", reason=reason, bytes=size)
    device_data = any(file.is_file() for prof in recorded.glob("PROF_*") for file in prof.rglob("*"))
    if device and not device_data:
        reason = f"the host was recorded, but no device data{_last_error(printed)}"
        return msgspec.structs.replace(artifact, status="empty", reason=reason, bytes=size)
    return msgspec.structs.replace(artifact, status="ok", bytes=size)


def _correct_clock(recorded: Path) -> None:
    """Give the analysis the clock reading that converts the host's times to wall-clock times.

    The host's times come from ``CLOCK_MONOTONIC_RAW``. If CANN recorded nothing, torch_npu converts
    them with a reading of ``CLOCK_MONOTONIC``, which NTP slews: after some hours of uptime the
    result is off by tenths of a second.
    """
    for path in recorded.glob("profiler_info*.json"):
        info = json.loads(path.read_text())
        end = info.get("end_info", {})
        if "collectionTimeEnd" in end and "MonotonicTimeEnd" in end:
            since_ns = time.time_ns() - int(end["collectionTimeEnd"])
            end["MonotonicTimeEnd"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - since_ns
            path.write_text(json.dumps(info, indent=4))


def _run_analysis(recorded: Path, export: Sequence[str], deadline_s: float) -> tuple[str, str]:
    """Return what the analysis printed, and the reason if it did not finish."""
    command = [sys.executable, "-c", _ANALYSE, str(recorded), ",".join(export)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            return printed, f"took longer than tools.npu.analysis_s={deadline_s:g}"
    if not (recorded / _RESULTS / _DONE).exists():
        return printed, f"did not finish (exit code {process.returncode})"
    return printed, ""


def _last_error(printed: str) -> str:
    errors = [line for line in printed.splitlines() if "[ERROR]" in line]
    return f" ({errors[-1].partition('.py: ')[2] or errors[-1]})" if errors else ""
