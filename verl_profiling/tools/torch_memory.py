"""The ``torch_memory`` tool: allocations on the accelerator,
as one memory snapshot per recording.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_profiling import clock
from verl_profiling.errors import CaptureStateError, ToolUnavailableError
from verl_profiling.files.opener import make_folder, move_file, scratch_folder
from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import Destination, Marks, Output, Recording, Tool, imported
from verl_profiling.tools.npu import TORCH_NPU
from verl_profiling.typed_values import Positive

logger = logging.getLogger(__name__)

OOM_SUFFIX = ".oom.memory.pickle"


@dataclass(frozen=True, kw_only=True)
class TorchMemoryOptions:
    """Options of the ``torch_memory`` tool.

    Attributes:
        max_entries: Number of the latest allocations and frees to keep; each takes some kilobytes.
        steps: Number of captured steps that one history of allocations covers, with the steps
            between them. Each captured step has a snapshot of the history so far. In discrete mode
            every stage has its own history.
        oom_folder: Folder for a snapshot of the first allocation that fails outside captures. If
            set, the history is recorded in every step, captured or not.
        peaks: Record the peaks of allocated and reserved bytes of each stage. This resets torch's
            peak statistics at each stage, which changes them for other readers.
    """

    max_entries: Positive = 100_000
    steps: Positive = 1
    oom_folder: str | None = None
    peaks: bool = True


class _Accelerator(NamedTuple):
    """The functions for memory histories that torch and torch_npu have in common.

    Attributes:
        memory: ``torch.cuda.memory`` or ``torch_npu.npu.memory``.
        history_enabled: Whether a history is being recorded.
        observe_oom: Registers a function to call when an allocation fails; it cannot be removed.
    """

    memory: Any
    history_enabled: Callable[[], bool]
    observe_oom: Callable[..., None]


class TorchMemoryTool(Tool):
    """Records the caching allocator's history, on CUDA and ROCm devices or on NPUs.

    A recording ends with a snapshot for https://pytorch.org/memory_viz.
    """

    name = "torch_memory"
    suffix = ".memory.pickle"
    options_class = TorchMemoryOptions
    options: TorchMemoryOptions

    def prepare(self) -> None:
        """Look for an accelerator; with ``oom_folder``, begin the history of all steps."""
        accelerator = _accelerator()
        if self.options.oom_folder:
            _history.record_every_step(accelerator, self.options)

    def start(self, destination: Destination) -> Recording:
        return _MemoryRecording(_accelerator(), destination, self.options)


class _MemoryRecording(Recording):
    def __init__(
        self, accelerator: _Accelerator, destination: Destination, options: TorchMemoryOptions
    ) -> None:
        self._accelerator = accelerator
        self._memory = accelerator.memory
        self._options = options
        self._destination = destination
        self._open: list[str] = []
        self._oom: Artifact | None = None
        self._metrics: dict[str, float] = {}
        _history.begin(accelerator, options, covers_step=destination.stage is None)
        _history.recording = self

    @property
    def marks(self) -> Marks | None:
        return Marks(self._begin, self._end) if self._options.peaks else None

    def stop(self) -> Sequence[Output]:
        try:
            self._metrics |= {
                "memory/allocated_bytes": float(self._memory.memory_allocated()),
                "memory/reserved_bytes": float(self._memory.memory_reserved()),
            }
            snapshot = self._write(TorchMemoryTool.suffix)
        finally:
            self.discard()
        return [Output(written) for written in (snapshot, self._oom) if written is not None]

    def discard(self) -> None:
        _history.recording = None
        _history.end(self._accelerator, self._options)

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def on_oom(self, device: int, wanted_bytes: int) -> None:
        """Write a snapshot at the first failed allocation; later failures are ignored."""
        if self._oom is None:
            oom = self._write(OOM_SUFFIX)
            reason = oom.reason or f"device {device} could not allocate {wanted_bytes} bytes"
            self._oom = oom.with_status(oom.status, reason, begin_ns=clock.now_ns())

    def _write(self, suffix: str) -> Artifact:
        final = self._destination.path(suffix)
        artifact = self._destination.artifact(TorchMemoryTool)
        if problem := _dump(self._memory, final):
            return artifact.with_status("failed", problem, path=final.name)
        return artifact.with_status("ok", path=final.name, bytes=final.stat().st_size)

    def _begin(self, name: str) -> str:
        self._take_peaks()
        self._open.append(name)
        return name

    def _end(self, name: str) -> None:
        self._take_peaks()
        self._open.remove(name)

    def _take_peaks(self) -> None:
        """Read and reset torch's peaks, which count for all open stages;
        stages may nest and overlap.
        """
        if statistics := self._memory.memory_stats_as_nested_dict():
            self._memory.reset_peak_memory_stats()
            for what in ("allocated_bytes", "reserved_bytes"):
                peak = float(statistics[what]["all"]["peak"])
                for name in self._open:
                    key = f"stage/{name}/peak_{what}"
                    self._metrics[key] = max(self._metrics.get(key, peak), peak)


class _History:
    """The only allocation history of this process, which may continue between recordings.

    torch keeps one history, and the application may record one itself, which this class leaves
    alone.

    Attributes:
        recording: The recording that gets a snapshot of a failed allocation, if any.
        folder: Folder for the snapshot of a failed allocation outside recordings; ``None`` for no
            snapshot.
    """

    def __init__(self) -> None:
        self.recording: _MemoryRecording | None = None
        self.folder: Path | None = None
        self._ours = False
        self._covered = 0
        self._observed: _Accelerator | None = None

    def begin(
        self, accelerator: _Accelerator, options: TorchMemoryOptions, *, covers_step: bool
    ) -> None:
        """Begin an empty history, unless the current history still covers this step (option
        ``steps``).

        Args:
            accelerator: The functions of torch or torch_npu.
            options: Options of the tool.
            covers_step: Whether a whole step is recorded, which counts for ``options.steps``.

        Raises:
            CaptureStateError: The application records a history of its own.
        """
        goes_on = self._ours and accelerator.history_enabled()
        if accelerator.history_enabled() and not goes_on:
            raise CaptureStateError(
                "a memory history is being recorded already, and a second one would end it; call "
                "_record_memory_history(enabled=None) first, or leave torch_memory out of tool"
            )
        if not (goes_on and covers_step and 0 < self._covered < options.steps):
            if goes_on:
                accelerator.memory._record_memory_history(enabled=None)
            accelerator.memory._record_memory_history(
                enabled="all",
                context="alloc",
                stacks="python",
                max_entries=options.max_entries,
            )
            self._ours, self._covered = True, 0
        self._covered += covers_step
        if self._observed is None:  # torch cannot remove an observer
            accelerator.observe_oom(self._notice)
            self._observed = accelerator

    def end(self, accelerator: _Accelerator, options: TorchMemoryOptions) -> None:
        """End the history, unless it continues until the next recording."""
        if not (options.oom_folder or 0 < self._covered < options.steps):
            accelerator.memory._record_memory_history(enabled=None)
            self._ours = False

    def record_every_step(self, accelerator: _Accelerator, options: TorchMemoryOptions) -> None:
        """Begin a history for failed allocations in any step, unless there is a history already."""
        if not (self._ours and accelerator.history_enabled()):
            self.begin(accelerator, options, covers_step=False)
        self.folder = Path(options.oom_folder or "")

    def _notice(self, device: int, wanted_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Handle a failed allocation, without exceptions, because the allocator is the caller."""
        recording = self.recording
        try:
            if recording is not None:
                recording.on_oom(device, wanted_bytes)
            elif self.folder is not None and self._observed is not None:
                path = self.folder / f"{socket.gethostname()}_{os.getpid()}{OOM_SUFFIX}"
                if path.exists():
                    return
                make_folder(path.parent)
                problem = _dump(self._observed.memory, path)
                logger.error(
                    "device %d could not allocate %d bytes, %d of %d are free: %s",
                    device,
                    wanted_bytes,
                    free_bytes,
                    total_bytes,
                    problem or path,
                )
        except Exception:
            logger.exception("torch_memory: no snapshot of the failed allocation")


_history = _History()


def _dump(memory: Any, path: Path) -> str:
    """Write a complete snapshot or none; return the reason of a failure, or ``""``."""
    try:
        with scratch_folder(path) as scratch:
            memory._dump_snapshot(str(scratch / path.name))
            move_file(scratch / path.name, path)
    except OSError as error:
        return f"the snapshot cannot be written into {path.parent}: {error.strerror or error}"
    return ""


def _accelerator() -> _Accelerator:
    torch = imported("torch", TorchMemoryTool.name)
    kind, package = "cuda", torch
    if not torch.cuda.is_available() and importlib.util.find_spec("torch_npu") is not None:
        kind, package = "npu", imported("torch_npu", TorchMemoryTool.name, TORCH_NPU)
    device, native = getattr(package, kind), package._C
    if device.is_available():
        names = (f"_{kind}_isHistoryEnabled", f"_{kind}_attach_out_of_memory_observer")
        return _Accelerator(device.memory, *(getattr(native, name) for name in names))
    raise ToolUnavailableError(
        f"tool 'torch_memory' records an accelerator's allocator, and torch {torch.__version__} "
        "sees no CUDA or ROCm device and no NPU; tool 'spans' has the process's peak resident "
        "memory after each stage"
    )
