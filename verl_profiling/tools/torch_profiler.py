"""The ``torch`` tool: ``torch.profiler``, one verified, compressed Kineto trace per recording."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
from isal import igzip

from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.machine import lost_kernels, own_bytes, used_devices
from verl_profiling.files.opener import move_file, opened, remove_file, scratch_folder, whole_file
from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import Destination, Marks, Output, Recording, Tool, imported
from verl_profiling.tools.flight_recorder import recorded_collectives
from verl_profiling.typed_values import NotNegative, Positive

logger = logging.getLogger(__name__)

CUDA = "cuda"
"""Type of the devices that torch records with CUPTI, or with its counterpart on ROCm."""

_CHUNK_BYTES = 4 << 20
_LEVEL = 1  # of compression: isal has 0 (fastest) to 3 (smallest)
_PHASE = b'"ph"'
_SPAN = b'"ph": "X"'
_OF_A_DEVICE = (b'"cat": "kernel"', b'"cat": "gpu_')
# Kineto synchronizes the device at the stop: with CUPTI, even an idle device has a call in the
# trace.
_CALL = b'"cat": "cuda_runtime"'
_LAUNCH = re.compile(rb'"cat": "cuda_(?:runtime|driver)",\s+"name": "\w*Launch')
_TAIL_BYTES = 8192  # more than a path can be long
# Kineto writes the trace's name behind the events, and then, by version, other plain values
# ("finalizeTrace" in its output_json.cpp). Other writers close the list of events last.
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_VALUES = rb"(?:,\s*" + _TEXT + rb":\s*(?:" + _TEXT + rb"|[-+.\w]+))*"
_END = re.compile(rb'(?:"traceName":\s*' + _TEXT + _VALUES + rb"\s*|\])\}\s*\Z")
_KINETO_TEXT = {'"': "'", "\\": "/"}


@dataclass(frozen=True, kw_only=True)
class MiniBatchWindow:
    """The mini-batches of a recording to keep, counted by ``capture.step()``.

    Attributes:
        wait: Mini-batches that are not recorded.
        warmup: Mini-batches that are recorded and discarded.
        active: Mini-batches that are kept.
    """

    wait: NotNegative = 0
    warmup: NotNegative = 0
    active: Positive = 1


@dataclass(frozen=True, kw_only=True)
class TorchOptions:
    """Options of the ``torch`` tool.

    Attributes:
        activities: Whose events are recorded: the host's (``cpu``) and a device's; ``None`` for all
            that torch can record here.
        stack: Record Python stacks of every op. Costly: about three times the events.
        shapes: Record the input shapes of every op.
        memory: Record allocations of memory. torch then records only the thread that starts the
            capture, so this must be the thread that trains.
        mini_batches: Keep only a window of mini-batches; ``None`` for everything.
    """

    activities: tuple[Literal["cpu", "cuda", "xpu"], ...] | None = None
    stack: bool = False
    shapes: bool = False
    memory: bool = False
    mini_batches: MiniBatchWindow | None = None

    def __post_init__(self) -> None:
        if self.activities is not None and not self.activities:
            raise ConfigError(
                "activities", "is empty; leave it out to record all activities of this machine"
            )


def _event_bytes(options: TorchOptions) -> tuple[int, int]:
    """Return the memory per event in bytes, during the recording and during the stop.

    Measured with torch 2.13 on a CPU (docs/performance.md). Devices' events are not measured.
    """
    if options.stack or options.memory:
        return (160, 2360) if options.shapes else (93, 1630)
    return (407, 2950) if options.shapes else (205, 1400)


class TorchTool(Tool):
    """Records with ``torch.profiler``.

    torch ties a profiler to the thread that started it: only that thread is recorded, and stopping
    the profiler elsewhere corrupts the export. The mode ``profile_all_threads`` has neither limit,
    and is used if torch has this mode. But the mode omits memory events, so with ``memory`` the
    starting thread owns the recording. ``trace_only`` avoids the Python copy of every event, which
    a trace does not need.
    """

    name = "torch"
    suffix = ".torch.json.gz"
    options_class = TorchOptions
    conflicts = frozenset({"npu"})
    engine_profiler = "torch"
    options: TorchOptions

    @property
    def any_thread(self) -> bool:  # type: ignore[override]
        return not self.options.memory and "profile_all_threads" in _experimental_options()

    def prepare(self) -> None:
        """Import now what the first profiler of a process imports: that takes seconds."""
        for module in ("torch.profiler", "torch._inductor.config"):
            imported(module, self.name)
        self._activities()

    def start(self, destination: Destination) -> Recording:
        import torch

        if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            raise CaptureStateError(
                f"{destination.lane}: another torch profiler already records this process, and two "
                "at once crash the process; stop the other one, or switch one of the two off"
            )
        window = self.options.mini_batches
        activities = self._activities()
        profiler = torch.profiler.profile(
            activities=activities,
            schedule=window and torch.profiler.schedule(**asdict(window), repeat=1),
            record_shapes=self.options.shapes,
            profile_memory=self.options.memory,
            with_stack=self.options.stack,
            experimental_config=self._experimental_config(),
        )
        profiler.preset_metadata_json(
            "verl_profiling", msgspec.json.encode(destination.metadata).decode()
        )
        on_accelerator = activities != [torch.profiler.ProfilerActivity.CPU]
        return _TorchRecording(profiler, destination, self.options, on_accelerator)

    def engine_output(self, written: Path, final: Path, expected: Artifact, device: str) -> Output:
        """Move a trace of JSON, or of gzip-compressed JSON, and verify it in the background."""
        activities = self.options.activities
        has_kernels = device == CUDA and (activities is None or CUDA in activities)
        return output_of_trace(written, final, expected, device=CUDA if has_kernels else "")

    def _experimental_config(self) -> Any:
        from torch._C._profiler import _ExperimentalConfig

        wanted: dict[str, Any] = {
            "trace_only": not self.options.stack,
            "profile_all_threads": self.any_thread,
        }
        return _ExperimentalConfig(**{name: wanted[name] for name in _experimental_options()})

    def _activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity, supported_activities

        supported = supported_activities()
        if self.options.activities is None:
            return sorted(supported, key=str)
        wanted = [getattr(ProfilerActivity, name.upper()) for name in self.options.activities]
        if missing := [activity.name.lower() for activity in wanted if activity not in supported]:
            have = ", ".join(sorted(activity.name.lower() for activity in supported))
            raise ToolUnavailableError(
                f"tools.torch.activities: this torch cannot record {', '.join(missing)} here, only "
                f"{have}; leave activities out to record all of these"
            )
        return wanted


@cache
def _experimental_options() -> frozenset[str]:
    """Return the options ``profile_all_threads`` and ``trace_only``, if torch has them."""
    from torch._C._profiler import _ExperimentalConfig

    signature = inspect.getdoc(_ExperimentalConfig.__init__) or ""
    return frozenset(name for name in ("profile_all_threads", "trace_only") if name in signature)


class _ShownNames(dict[str, str]):
    """Stage names in printable ASCII, because Kineto loses other characters,
    and a quote breaks its JSON.
    """

    def __missing__(self, name: str) -> str:
        shown = "".join(
            _KINETO_TEXT.get(c) or (c if " " <= c <= "~" else f"<{ord(c):x}>") for c in name
        )
        return self.setdefault(name, shown)


@dataclass(eq=False)
class _TorchRecording(Recording):
    """A recording of torch, whose trace shows each stage as a range.

    With an accelerator, the ranges are user annotations, which torch repeats above the kernels
    (about 1.6 us each). On CPUs, the cheaper fast ranges (about 0.6 us) do. torch writes them as
    operators, and
    :func:`output_of_trace` rewrites those as annotations.
    """

    _profiler: Any
    _destination: Destination
    _options: TorchOptions
    _on_accelerator: bool

    def __post_init__(self) -> None:
        self._mini_batches = 0
        self._shown = _ShownNames()
        self._own_bytes = own_bytes()
        self._started = _started_profilers()
        self._profiler.start()
        self._known = self._started[0]

    @property
    def marks(self) -> Marks:
        import torch

        shown = self._shown
        if self._on_accelerator:
            enter = torch.autograd._record_function_with_args_enter
            return Marks(
                lambda name: enter(shown[name]), torch.autograd._record_function_with_args_exit
            )
        fast_range = torch._C._profiler._RecordFunctionFast

        def begin(name: str) -> object:
            mark = fast_range(shown[name])
            mark.__enter__()
            return mark

        return Marks(begin, lambda mark: mark.__exit__(None, None, None))

    def step(self) -> None:
        self._mini_batches += 1
        if self._options.mini_batches is not None and not self._is_replaced:
            # After its `wait` mini-batches, our profiler starts in step().
            self._profiler.step()
            self._known = self._started[0]

    @property
    def _is_replaced(self) -> bool:
        """Whether another profiler was started while this one recorded; its stop would crash."""
        return self._started[0] != self._known and self._profiler.current_action.name != "NONE"

    def bytes_to_stop(self) -> int | None:
        own = own_bytes()
        if own is None or self._own_bytes is None or self._profiler.current_action.name == "NONE":
            return None  # outside the mini-batch window
        recorded, stopped = _event_bytes(self._options)
        return max(0, own - self._own_bytes) // recorded * (stopped - recorded)

    def stop(self) -> list[Output]:
        if self._is_replaced:
            raise CaptureStateError(
                "another torch profiler was started in this process during the capture and "
                "replaced the recording: only its profile is kept; switch one of the two off"
            )
        self._profiler.stop()
        expected = self._destination.artifact(TorchTool)
        window = self._options.mini_batches
        if window is not None and self._mini_batches < window.wait + window.warmup:
            reason = (
                f"the mini-batch window opens after {window.wait + window.warmup} calls of "
                f"capture.step(), and there were {self._mini_batches}"
            )
            return [Output(expected.with_status("empty", reason))]
        final = self._destination.path(TorchTool.suffix)
        uses_cuda = self._on_accelerator and CUDA in {device.kind for device in used_devices()}
        device = CUDA if uses_cuda else ""
        with scratch_folder(final) as scratch:
            written = scratch / final.stem
            self._profiler.export_chrome_trace(str(written))
            names = self._shown.values()
            output = output_of_trace(written, final, expected, names, device, recorded_collectives)
        events = [self._profiler.profiler]  # in a reference cycle: released by clear() below
        self._profiler.profiler = None
        if (finish := output.finish) is None:
            return [output]

        def release_and_finish() -> Artifact:
            events.clear()  # frees their memory in the background
            return finish()

        return [replace(output, finish=release_and_finish)]

    def discard(self) -> None:
        if not self._is_replaced:
            self._profiler.stop()


@cache
def _started_profilers() -> list[int]:
    """Return a counter of the torch profilers that this process starts.

    Torch does not report a second profiler itself.
    """
    from torch.autograd import profiler

    count, original = [0], profiler._run_on_profiler_start

    def counted() -> None:
        count[0] += 1
        original()

    profiler._run_on_profiler_start = counted
    return count


def output_of_trace(
    written: Path,
    final: Path,
    expected: Artifact,
    ranges: Iterable[str] = (),
    device: str = "",
    records: Callable[[], bytes] = bytes,
) -> Output:
    """Move a new trace to its final name; ``finish`` of the output compresses and verifies it.

    Profilers have reported success for missing or cut off files (full disk, folder without write
    permission), so the file itself is checked.

    Args:
        written: The file under its temporary name: JSON, or compressed JSON that ends in ``.gz``.
        final: Path of the compressed artifact, ending in ``.json.gz``.
        expected: The expected artifact, not finished yet.
        ranges: Names of user annotations that the profiler recorded as operators.
        device: Type of the used device, whose events must be in the trace; empty for none.
        records: Returns torch's records of collectives, which become a part of the header.

    Returns:
        A ``pending`` output whose ``finish`` compresses and verifies, or a final one that is
        ``failed`` (no file) or ``truncated`` (cut off; the written part is kept).
    """
    pending = expected.with_status("pending")
    if written.suffix == ".gz":
        move_file(written, final)
        return Output(pending, lambda: _read_packed(final, pending, device))
    # torch renames the file once it is written.
    unfinished = written.with_name(f"{written.name}.tmp")
    if not written.exists() and unfinished.exists():
        unfinished.replace(written)
    tail = _tail(written)
    if not tail:
        with suppress(FileNotFoundError):
            remove_file(written)
        reason = (
            f"the profiler wrote no file into {final.parent} ({_why_not_writable(final.parent)})"
        )
        return Output(expected.with_status("failed", reason))
    raw = final.with_suffix("")
    move_file(written, raw)
    if not _END.search(tail):
        size = raw.stat().st_size
        reason = f"cut off after {size} bytes ({_why_not_writable(final.parent)})"
        return Output(expected.with_status("truncated", reason, path=raw.name, bytes=size))
    names = sorted(set(ranges))
    return Output(
        pending,
        lambda: _compressed(raw, final, pending, _annotations(names), device, records()),
    )


def _tail(path: Path) -> bytes:
    """Return the last bytes of a file; empty for an unreadable file."""
    try:
        with opened(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _why_not_writable(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"
    if not os.access(folder, os.W_OK):
        return "no write permission"
    return f"{room.f_bavail * room.f_frsize >> 20} MiB free there"


def _annotations(names: list[str]) -> re.Pattern[bytes] | None:
    """Return a pattern that matches operators with these names in Kineto's JSON."""
    if not names:
        return None
    alternatives = b"|".join(re.escape(msgspec.json.encode(name)) for name in names)
    return re.compile(rb'"cat": "cpu_op",(\s+)(?="name": (?:' + alternatives + rb"),)")


def _compressed(
    raw: Path,
    final: Path,
    pending: Artifact,
    annotations: re.Pattern[bytes] | None,
    device: str,
    records: bytes,
) -> Artifact:
    """Compress ``raw`` and the records to ``final``, read it back, and only then remove ``raw``.

    After a failure, the raw file is kept and becomes the artifact.
    """
    try:
        with opened(raw) as source, whole_file(final) as packed:
            _compress(source, packed, annotations, records)
            artifact = _read_through(packed, pending, device)
            if artifact.status == "truncated":
                raise OSError("the compressed file cannot be read back completely")
        remove_file(raw)
    except OSError as error:
        size = raw.stat().st_size if raw.exists() else None
        return pending.with_status("ok", f"left uncompressed: {error}", path=raw.name, bytes=size)
    return artifact


def _compress(
    source: BinaryIO, packed: BinaryIO, annotations: re.Pattern[bytes] | None, records: bytes
) -> None:
    with igzip.open(packed, "wb", compresslevel=_LEVEL) as target:
        if records:
            space, brace, _ = source.readline().partition(b"{")  # Kineto writes white space first
            target.write(b'{"collectives": %s,' % records)
            source.seek(len(space + brace))
        for piece in _pieces(source):
            if annotations is not None:
                piece = annotations.sub(rb'"cat": "user_annotation",\1', piece)
            target.write(piece)


def _read_packed(path: Path, pending: Artifact, device: str) -> Artifact:
    with opened(path) as packed:
        return _read_through(packed, pending, device)


def _read_through(packed: BinaryIO, pending: Artifact, device: str) -> Artifact:
    """Read a compressed trace to its end; return its artifact with status and number of events.

    torch records kernels with CUPTI, which serves one subscriber per process. If another subscriber
    was first, torch records only the host, without an error.
    """
    events, spans, tail, lost, calls, launches = 0, 0, b"", device, False, False
    size = packed.seek(0, os.SEEK_END)
    packed.seek(0)
    try:
        with igzip.open(packed, "rb") as file:
            for piece in _pieces(file):
                events += piece.count(_PHASE)
                spans += piece.count(_SPAN)
                tail = piece[-_TAIL_BYTES:]
                if lost and any(mark in piece for mark in _OF_A_DEVICE):
                    lost = ""
                if lost:
                    calls |= _CALL in piece
                    launches |= _LAUNCH.search(piece) is not None
    except (OSError, EOFError):
        tail = b""  # cut off inside of the compression
    artifact = pending.with_status("ok", bytes=size, events=events)
    if not _END.search(tail):
        reason = f"cut off after {size} bytes: the engine did not write the end"
        return artifact.with_status("truncated", reason)
    if not spans:
        return artifact.with_status("empty", "the trace holds no spans")
    if lost and (launches or not calls):
        reason = f"{lost} was in use, but none of its events was recorded: {lost_kernels()}"
        logger.warning("%s: %s", artifact.path, reason)
        return artifact.with_status("ok", reason, unrecorded_device=lost)
    return artifact


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    """Yield a trace in large pieces, none of which ends inside of an event.

    Cuts are before ``"ph"``, the first key of the events that torch's profiler writes.
    """
    rest = b""
    while chunk := source.read(_CHUNK_BYTES):
        events, phase, begun = (rest + chunk).rpartition(_PHASE)
        if events:
            yield events
        rest = phase + begun
    if rest:
        yield rest
