"""The ``npu`` tool: ``torch_npu.profiler`` on Ascend devices, one folder per recording."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.opener import make_folder, read_small, whole_file
from verl_profiling.files.run_files import RECORDING_SUFFIX
from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import (
    Destination,
    Marks,
    Output,
    Recording,
    Tool,
    folder_bytes,
    imported,
    remove_folder,
)
from verl_profiling.tools.torch_profiler import MiniBatchWindow
from verl_profiling.typed_values import Seconds

DOMAIN = "verl_profiling"
"""Domain of the mstx ranges of stages."""

TORCH_NPU = "torch_npu, in the version that fits your torch, and source set_env.sh of CANN"
"""How to install torch_npu, after ``pip install``."""

_ANALYSE = """\
import sys
from torch_npu.profiler.profiler import analyse
analyse(sys.argv[1], export_type=sys.argv[2].split(","))
"""
_RESULTS = "ASCEND_PROFILER_OUTPUT"
_DONE = "analyse.done"

Level = Literal["none", "level0", "level1", "level2"]
Metrics = Literal[
    "PipeUtilization",
    "ArithmeticUtilization",
    "Memory",
    "MemoryL0",
    "MemoryUB",
    "ResourceConflictRatio",
    "L2Cache",
    "MemoryAccess",
    "AiCoreNone",
]


@dataclass(frozen=True, kw_only=True)
class NpuOptions:
    """Options of the ``npu`` tool.

    Attributes:
        activities: Whose events are recorded: the host's (``cpu``) and the device's (``npu``).
        level: Amount of recorded data of the device. ``level0``: operators; ``level1``: also CANN's
            calls and AI core metrics; ``level2``: also CANN's runtime and caches; ``none``: mstx
            ranges only.
        aic_metrics: AI core metrics; by default ``PipeUtilization`` if the level has any.
        stack: Record the Python stack of every op. Costly.
        shapes: Record the input shapes of every op.
        memory: Record allocations of memory.
        modules: Record the name of the module to which each op belongs.
        mstx: Show stages as mstx ranges, above the device's operators.
        export: Formats that the analysis writes. A timeline needs ``text``.
        analysis: Convert the recording into readable files, in a separate process.
        analysis_s: Seconds after which an analysis is ended.
        mini_batches: Keep only a window of mini-batches; ``None`` for everything.
    """

    activities: tuple[Literal["cpu", "npu"], ...] = ("cpu", "npu")
    level: Level = "level1"
    aic_metrics: Metrics | None = None
    stack: bool = False
    shapes: bool = False
    memory: bool = False
    modules: bool = False
    mstx: bool = True
    export: tuple[Literal["text", "db"], ...] = ("text", "db")
    analysis: bool = True
    analysis_s: Seconds = 600.0
    mini_batches: MiniBatchWindow | None = None

    def __post_init__(self) -> None:
        if not self.activities:
            raise ConfigError(
                "activities", "is empty; leave it out to record the host and the device"
            )
        if "text" not in self.export:
            raise ConfigError(
                "export", "must contain 'text', of which the timeline is made, e.g. [text, db]"
            )
        has_metrics = self.aic_metrics not in (None, "AiCoreNone")
        if has_metrics and self.level in ("none", "level0"):
            raise ConfigError("aic_metrics", f"needs level1 or level2, level is {self.level}")
        if self.level == "none" and not self.mstx:
            raise ConfigError("level", "none records only mstx ranges, but mstx is false")


class NpuTool(Tool):
    """Records with ``torch_npu.profiler``.

    The methods of torch_npu print errors instead of raising. So this tool checks the profiler's
    state after a start, and the folder after a stop. torch_npu's analysis forks the calling
    process, and changes how that process starts others. So the analysis runs in a separate process
    during training.
    """

    name = "npu"
    suffix = ".npu"
    options_class = NpuOptions
    conflicts = frozenset({"torch", "nsys"})
    engine_profiler = "npu"
    options: NpuOptions
    any_thread = False

    def prepare(self) -> None:
        """Import torch_npu and look for a device."""
        torch_npu = imported("torch_npu", self.name, TORCH_NPU)
        if "npu" in self.options.activities and not torch_npu.npu.is_available():
            raise ToolUnavailableError(
                "tool 'npu': torch_npu sees no NPU; check `npu-smi info` and "
                "ASCEND_RT_VISIBLE_DEVICES"
            )

    def start(self, destination: Destination) -> Recording:
        """Start recording into the folder of a destination."""
        import torch

        if torch._C._autograd._profiler_enabled():
            raise CaptureStateError(
                f"{destination.lane}: another profiler (torch's or torch_npu's) already records "
                "this thread, and two destroy each other's data; stop the other one, or switch one "
                "of the two off"
            )
        folder = destination.path(self.suffix)
        make_folder(folder, exist_ok=False)
        profiler = self._profiler(folder, destination.lane)
        profiler.start()
        if self.options.mini_batches is None and not torch._C._autograd._profiler_enabled():
            profiler.stop()
            raise CaptureStateError(
                f"{destination.lane}: torch_npu did not start recording into {folder}; see the "
                "[ERROR] that it printed"
            )
        profiler.add_metadata_json(
            "verl_profiling", msgspec.json.encode(destination.metadata).decode()
        )
        return _NpuRecording(profiler, destination, self.options, folder)

    def engine_output(self, written: Path, final: Path, expected: Artifact, device: str) -> Output:
        """Move the folder of a recording; a missing analysis runs in the background."""
        make_folder(final, exist_ok=False)
        recorded = final / written.name
        shutil.move(written, recorded)
        return output_of_recording(recorded, expected, self.options)

    def _profiler(self, folder: Path, lane: str) -> Any:
        api, options = imported("torch_npu", self.name).profiler, self.options
        has_metrics = options.level in ("level1", "level2")
        metrics = options.aic_metrics or ("PipeUtilization" if has_metrics else "AiCoreNone")
        level = "Level_none" if options.level == "none" else options.level.capitalize()
        window = options.mini_batches
        return api.profile(
            activities=[getattr(api.ProfilerActivity, name.upper()) for name in options.activities],
            schedule=window and api.schedule(**asdict(window), repeat=1),
            # torch_npu writes all output of a process into the folder of the handler that was made
            # last. So each recording makes a handler of its own just before its start.
            on_trace_ready=api.tensorboard_trace_handler(
                str(folder), worker_name=lane, analyse_flag=False
            ),
            record_shapes=options.shapes,
            profile_memory=options.memory,
            with_stack=options.stack,
            with_modules=options.modules,
            experimental_config=api._ExperimentalConfig(
                profiler_level=getattr(api.ProfilerLevel, level),
                aic_metrics=getattr(api.AiCMetrics, metrics),
                mstx=options.mstx,
                export_type=[getattr(api.ExportType, name.capitalize()) for name in options.export],
            ),
        )


@dataclass(eq=False)
class _NpuRecording(Recording):
    _profiler: Any
    _destination: Destination
    _options: NpuOptions
    _folder: Path

    @property
    def marks(self) -> Marks:
        import torch
        from torch_npu.npu import mstx

        enter = torch.autograd._record_function_with_args_enter
        leave = torch.autograd._record_function_with_args_exit
        if not self._options.mstx:
            return Marks(enter, leave)

        def end(mark: tuple[int, Any]) -> None:
            range_id, handle = mark
            leave(handle)
            if range_id:
                mstx.range_end(range_id, domain=DOMAIN)

        return Marks(lambda name: (mstx.range_start(name, domain=DOMAIN), enter(name)), end)

    def step(self) -> None:
        if self._options.mini_batches is not None:
            self._profiler.step()

    def stop(self) -> Sequence[Output]:
        self._profiler.stop()
        artifact = self._destination.artifact(NpuTool)
        recorded = sorted(self._folder.glob(f"*{RECORDING_SUFFIX}"))
        if recorded:
            return [output_of_recording(recorded[-1], artifact, self._options)]
        reason = f"torch_npu printed an [ERROR]: {self._folder} is empty"
        if self._options.mini_batches is not None:
            reason = "the window of mini-batches did not open: it counts calls of capture.step()"
        return [Output(artifact.with_status("empty", reason))]

    def discard(self) -> None:
        self._profiler.stop()
        remove_folder(self._folder)


def output_of_recording(recorded: Path, artifact: Artifact, options: NpuOptions) -> Output:
    """Return the output of a recording; a missing analysis runs in the background.

    Args:
        recorded: The folder ``*_ascend_pt`` of torch_npu in the artifact's folder.
        artifact: The expected artifact, not finished yet.
        options: Options of the tool.
    """
    folder = recorded.parent
    if not _has_data(recorded, "FRAMEWORK", "PROF_*"):
        reason = (
            "no operator ran on the thread that recorded, or torch_npu printed an "
            f"[ERROR]: see {folder}"
        )
        return Output(artifact.with_status("empty", reason))
    if not options.analysis:
        reason = (
            f"not analysed (tools.npu.analysis is false); run torch_npu's analyse({str(folder)!r})"
        )
        return Output(artifact.with_status("ok", reason, bytes=folder_bytes(folder)))
    pending = artifact.with_status("pending")
    return Output(pending, lambda: _analysed(recorded, pending, options))


def _has_data(recorded: Path, *parts: str) -> bool:
    """Return whether torch_npu recorded data of the host (``FRAMEWORK``)
    or the device (``PROF_*``).
    """
    return any(folder_bytes(found) for part in parts for found in recorded.glob(part))


def _analysed(recorded: Path, artifact: Artifact, options: NpuOptions) -> Artifact:
    """Run torch_npu's analysis on a recording that lacks it; return the artifact with its status.

    A rollout engine may have analysed its recording itself. A recording of only the host is
    analysed again, because torch_npu converts the host's times with the wrong clock.
    """
    results, device = recorded / _RESULTS, "npu" in options.activities
    printed, problem = "", ""
    if not (device and (results / _DONE).exists()):
        _correct_clock(recorded)
        printed, problem = _run_analysis(recorded, options)
    trace = results / "trace_view.json"
    size = folder_bytes(recorded.parent)
    if problem or not trace.is_file():
        reason = (
            f"the analysis {problem or 'wrote no trace_view.json'}{_last_error(printed)}; "
            "raw data is kept"
        )
        return artifact.with_status("failed", reason, bytes=size)
    if device and not _has_data(recorded, "PROF_*"):
        reason = f"the host was recorded, but no device data{_last_error(printed)}"
        return artifact.with_status("empty", reason, bytes=size)
    return artifact.with_status("ok", bytes=size)


def _correct_clock(recorded: Path) -> None:
    """Write the clock reading with which the analysis converts the host's times to wall-clock
    times.

    The host's times come from ``CLOCK_MONOTONIC_RAW``. If CANN recorded nothing, torch_npu converts
    them with a reading of ``CLOCK_MONOTONIC``, which NTP slews: after some hours of uptime the
    result is off by tenths of a second.
    """
    for path in recorded.glob("profiler_info*.json"):
        info = json.loads(read_small(path))
        end = info.get("end_info", {})
        if "collectionTimeEnd" in end and "MonotonicTimeEnd" in end:
            since_ns = time.time_ns() - int(end["collectionTimeEnd"])
            end["MonotonicTimeEnd"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - since_ns
            with whole_file(path) as file:
                file.write(json.dumps(info, indent=4).encode())


def _run_analysis(recorded: Path, options: NpuOptions) -> tuple[str, str]:
    """Run the analysis; return its output, and the reason of a failure.

    The analysis has a process of its own, because it forks and changes the start method of
    processes.
    """
    (recorded / _RESULTS / _DONE).unlink(missing_ok=True)  # left by an engine's analysis
    command = [sys.executable, "-c", _ANALYSE, str(recorded), ",".join(options.export)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=options.analysis_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            return printed, f"took longer than tools.npu.analysis_s={options.analysis_s:g}"
    if not (recorded / _RESULTS / _DONE).exists():
        return printed, f"did not finish (exit code {process.returncode})"
    return printed, ""


def _last_error(printed: str) -> str:
    errors = [line for line in printed.splitlines() if "[ERROR]" in line]
    return f" ({errors[-1].partition('.py: ')[2] or errors[-1]})" if errors else ""
