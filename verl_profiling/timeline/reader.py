"""Streaming, typed reader of Chrome trace files, in bounded memory whatever their size.

It reads what torch (2.1 and later), vLLM, SGLang, torch_npu (``trace_view.json``) and this
package write: an object with ``traceEvents`` or a bare list of events, compressed or not.

Clocks: ``unix_ns = base_ns + round(ts * 1000)``. torch from 2.4 on writes
``baseTimeNanoseconds``; older torch and torch_npu write absolute microseconds, which a
double resolves to 0.25 us only. Those are parsed as decimals and get a base computed from the
first event, so events are relative to a base in every format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.blocks import BLOCK_BYTES, Blocks
from verl_profiling.timeline.trailer import read_trailer

__all__ = ["GPU_CATEGORIES", "Event", "Trace", "TraceWarning"]

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
"""Categories of the events on the lanes of a device's streams, as kineto names them."""

NO_ARGS = msgspec.Raw(b"")

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_SEPARATOR = re.compile(rb"\s*,\s*")
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError)
_HEADER_LIMIT = 16 << 20
_EVENT_LIMIT = 64 << 20
_READ_ON = 1 << 16


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """One event of the `Trace Event Format`_; a field that is absent is ``None``.

    Attributes:
        ts: Begin in microseconds since the trace's ``base_ns``.
        dur: Duration in microseconds.
        args: The arguments as JSON, not decoded.

    .. _Trace Event Format:
        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    bp: str | None = None
    s: str | None = None
    id2: dict[str, Any] | None = None
    scope: str | None = None
    cname: str | None = None
    args: msgspec.Raw = NO_ARGS


class _AbsoluteEvent(Event):
    ts: Decimal | None = None  # type: ignore[assignment]  # converted to a float before the event is handed out


class TraceWarning(msgspec.Struct, frozen=True):
    """Something in a file that could not be read.

    Attributes:
        offset: Byte offset in the uncompressed content.
        message: What was wrong there.
    """

    offset: int
    message: str

    def __str__(self) -> str:
        return f"byte {self.offset}: {self.message}"


class Trace:
    """One trace file.

    Attributes:
        path: The file.
        metadata: The top-level keys other than ``traceEvents``.
        base_ns: Unix nanoseconds of ``ts == 0``. For a file without a base it is 0 until the first
            event with a time has been read.
        warnings: What could not be read; complete when :meth:`chunks` is exhausted.
        truncated: Whether the content ends early; the last warning then says where.
        events: Number of events read so far.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read what precedes the events.

        Raises:
            TraceFormatError: It cannot be read, or is not a trace.
        """
        self.path = path
        self.warnings: list[TraceWarning] = []
        self.truncated = False
        self.events = 0
        self._blocks = Blocks(path)
        self._source = iter(self._blocks)
        self._buffer = b""
        self._consumed = 0
        self._ended = False
        self.metadata = self._read_header()
        if "baseTimeNanoseconds" not in self.metadata:
            self.metadata.update(read_trailer(path))
        base = self.metadata.get("baseTimeNanoseconds")
        self.base_ns = base if isinstance(base, int) else 0
        self._relative = isinstance(base, int)
        kind = list[Event] if self._relative else list[_AbsoluteEvent]
        self._decoder: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(kind, strict=False)

    @property
    def rank(self) -> int | None:
        """The process's rank in ``torch.distributed``, if the file has it."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) else None

    def chunks(self, size: int = BLOCK_BYTES) -> Iterator[list[Event]]:
        """Yield the events in the order of the file, some thousands at a time.

        For a damaged or truncated file, yields what can be read and adds a warning.

        Args:
            size: Bytes of JSON to decode at a time.

        Raises:
            TraceFormatError: The file can no longer be read, or one event exceeds 64 MiB.
        """
        wanted = size
        while not self._ended:
            last = not self._fill(wanted)
            cut = len(self._buffer) if last else _last_boundary(self._buffer)
            events, used = self._decode(cut, last)
            used += _separator(self._buffer, used)
            if not used and not last:
                wanted *= 2
                if wanted > _EVENT_LIMIT:
                    raise TraceFormatError(self.path, "no end of an event within 64 MiB", self._consumed)
                continue
            wanted = size
            self._drop(used)
            self._ended = self._ended or last
            self.events += len(events)
            if events:
                yield self._on_base(events)
        while self._fill(_READ_ON):  # skipping the rest of the file shows whether it is whole
            self._drop(len(self._buffer))
        if self._blocks.damage:
            self.truncated = True
            self.warnings.append(TraceWarning(self._blocks.position, self._blocks.damage))

    def _read_header(self) -> dict[str, Any]:
        while self._fill(len(self._buffer) + 1):
            text = self._buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text[:1] == b"[":
                self._drop(len(self._buffer) - len(text) + 1)
                return {}
            if text[:1] not in (b"{", b""):
                break
            if match := _EVENTS_KEY.search(self._buffer):
                head = self._buffer[: match.end()]
                self._drop(match.end())
                try:
                    header: dict[str, Any] = json.loads(head.decode("utf-8", "replace") + "]}")
                except ValueError as error:
                    raise TraceFormatError(self.path, f"bad JSON before traceEvents ({error})") from error
                header.pop("traceEvents")
                return header
            if len(self._buffer) > _HEADER_LIMIT:
                break
        if not self._buffer.strip():
            raise TraceFormatError(self.path, f"is empty{self._damage_note()}", 0)
        raise TraceFormatError(self.path, f"not a Chrome trace: found no traceEvents{self._damage_note()}", 0)

    def _damage_note(self) -> str:
        return f" ({self._blocks.damage})" if self._blocks.damage else ""

    def _fill(self, wanted: int) -> bool:
        """Read until the buffer holds ``wanted`` bytes; return False at the end of the file."""
        parts = [self._buffer]
        size = len(self._buffer)
        while size < wanted:
            block = next(self._source, b"")
            if not block:
                break
            parts.append(block)
            size += len(block)
        if len(parts) > 1:
            self._buffer = b"".join(parts)
        return size >= wanted

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._consumed += count

    def _decode(self, end: int, last: bool) -> tuple[list[Event], int]:
        """Return the events in the first ``end`` bytes of the buffer, and how many bytes were consumed."""
        text = memoryview(self._buffer)[:end]
        try:
            if not last:
                return self._decoder.decode(b"".join((b"[", text, b"]"))), end
            close = self._buffer.rfind(b"]")  # nearly always the end of the list
            events = self._decoder.decode(b"".join((b"[", text[: close + 1])))
            self._ended = True
            return events, close
        except _UNDECODABLE:
            pass  # it contains the end of the list, or damage
        listed = b"".join((b"[", text))
        try:
            self._decoder.decode(listed)
        except _UNDECODABLE as error:
            if match := _TRAILING.search(str(error)):
                close = listed.rindex(b"]", 0, int(match[1]))
                self._ended = True
                return self._decoder.decode(listed[: close + 1]), close - 1
        return self._decode_one_by_one(bytes(text), last)

    def _decode_one_by_one(self, text: bytes, last: bool) -> tuple[list[Event], int]:
        """Decode a damaged stretch event by event, with the more tolerant ``json`` module.

        It accepts ``NaN`` and invalid UTF-8. Events that are not JSON are skipped.
        """
        characters = text.decode("utf-8", "replace")
        scanner = json.JSONDecoder()
        events: list[Event] = []
        position = 0

        def offset(index: int) -> int:
            return len(characters[:index].encode())

        while True:
            while position < len(characters) and characters[position] in ", \t\r\n":
                position += 1
            if position == len(characters):
                if last:
                    self._warn(len(text), "the list of events is not closed: the file is truncated")
                    self.truncated = True
                return events, len(text)
            if characters[position] == "]":
                self._ended = True
                return events, offset(position)
            try:
                value, position = scanner.raw_decode(characters, position)
                events += self._decoder.decode(msgspec.json.encode([value]))
            except msgspec.ValidationError as error:
                self._warn(offset(position), f"skipped something that is not an event ({error})")
            except json.JSONDecodeError as error:
                following = _BOUNDARY.search(characters[error.pos :].encode())
                if following is None:
                    if last:
                        self._warn(offset(position), "the last event is cut off: the file is truncated")
                        self.truncated = True
                        return events, len(text)
                    return events, offset(position)
                self._warn(offset(position), f"skipped an unreadable event ({error.msg})")
                position = error.pos + len(characters[error.pos :].encode()[: following.end()].decode())

    def _warn(self, offset: int, message: str) -> None:
        self.warnings.append(TraceWarning(self._consumed + offset, message))

    def _on_base(self, events: list[Event]) -> list[Event]:
        if self._relative:
            return events
        for event in events:
            if event.ts is None:
                continue
            if not self.base_ns:
                self.base_ns = int(event.ts) // 1_000_000 * 1_000_000_000
            event.ts = float(event.ts - self.base_ns // 1000)
        return events


def _last_boundary(buffer: bytes) -> int:
    """Return the end of the last event that is certainly whole, or 0."""
    for window in (1 << 16, len(buffer)):
        start = max(0, len(buffer) - window)
        ends = [match.start() + 1 for match in _BOUNDARY.finditer(buffer, start)]
        if ends:
            return ends[-1]
    return 0


def _separator(buffer: bytes, position: int) -> int:
    """Return the length of the comma and white space between two events."""
    match = _SEPARATOR.match(buffer, position)
    return match.end() - position if match else 0
