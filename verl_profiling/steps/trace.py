"""Reads Chrome trace files of any size as a stream of typed events, in bounded memory.

Traces may be from torch (2.1 and later), vLLM, SGLang, torch_npu (``trace_view.json``) and this
package. A file has an object with ``traceEvents`` or a bare list of events, compressed or not.

Clocks: ``unix_ns = base_ns + round(ts * 1000)``. torch from 2.4 on writes ``baseTimeNanoseconds``.
Older torch and torch_npu write absolute microseconds, which a double resolves to 0.25 us only. So
absolute times are parsed as decimals, and converted relative to the time of the first event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import UNDECODABLE
from verl_profiling.manifest import MAX_NS
from verl_profiling.steps.databases import NO_DATABASE
from verl_profiling.steps.trace_content import BLOCK_BYTES, Blocks, Limits
from verl_profiling.units import byte_size

MAX_US = 4e15
"""Largest distance of an event's time from its base (us): 126 years, i.e.
up to 2096 for a base of 0.
"""

LONGEST_US = 1e15
"""Longest duration of an event (us)."""

NO_ARGS = msgspec.Raw(b"")

NO_TRACE = "not a Chrome trace: found no traceEvents"

_HINTS = {
    ".nsys-rep": "is a report of Nsight Systems; run `nsys export --type sqlite` on it, and "
    "give the .sqlite",
    ".sqlite": NO_DATABASE,
    ".db": NO_DATABASE,
    ".pickle": "is a snapshot of torch's memory, and no trace; open it at "
    "https://pytorch.org/memory_viz",
    ".zst": "is compressed; run `zstd -d` on it first",
    ".zip": "is an archive; unpack it first",
}
"""Advice on files that are no traces, by suffix."""

_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str | int)
_BASE = "baseTimeNanoseconds"
_BASE_BEHIND = re.compile(rb'"baseTimeNanoseconds"\s*:\s*([^,}]*)')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_SEPARATOR = re.compile(rb"[\s,]*")
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_OBJECT = re.compile(rb'\{\s*"')
_NAME = re.compile(rb'\{\s*"ph"[^{}]*?"name"\s*:\s*"(.*)"\s*,\s*"pid"\s*:', re.DOTALL)
_PHASE = re.compile(rb'"ph"\s*:')
_IMPOSSIBLE = re.compile(r"Expected `float` [<>]= .* - at `\$\[0\]\.dur`")  # msgspec, on a duration
_SCANNER = json.JSONDecoder()
_TOLERANT = json.JSONDecoder(parse_constant=lambda name: None)
_TAIL_BYTES = 1 << 18  # of the file's end, which may have baseTimeNanoseconds
_MOST_OBJECTS = 1000  # to try behind damage, so that nested garbage takes milliseconds
_MOST_HEAD = 16 << 20  # bytes before traceEvents
_MOST_EVENT = 16 << 20  # bytes of one event
_MAX_DECIMAL = Decimal(MAX_US)
_UNTRAPPED = Context(traps=[])  # a comparison with NaN is false


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """One event of the `Trace Event Format`_, which defines the fields; an absent field has its
    default.

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
    ts: Annotated[float, msgspec.Meta(ge=-MAX_US, le=MAX_US)] | None = None
    dur: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_US)] | None = None
    id: int | str | None = None
    bp: str | None = None
    s: str | None = None
    id2: dict[str, Any] | None = None
    scope: str | None = None
    cname: str | None = None
    args: msgspec.Raw = NO_ARGS

    def said(self, key: str) -> str:
        """Return an argument of the event as text; ``""`` if it is missing, or neither a string nor
        an integer.
        """
        try:
            return str(_TEXT.decode(_ARGUMENTS.decode(self.args)[key]))
        except (*UNDECODABLE, KeyError):
            return ""


class AbsoluteEvent(Event):
    """An event of a trace with absolute times; ``ts`` is an exact decimal before its conversion."""

    ts: Decimal | None = None  # type: ignore[assignment]  # converted to a float before the event is handed out


class Trace:
    """One trace file.

    Attributes:
        path: The file.
        metadata: The top-level keys before ``traceEvents``, and ``baseTimeNanoseconds`` from any
            place.
        base_ns: Unix nanoseconds of ``ts == 0``. For a file without a base, 0 until the first event
            with a time is read.
        warnings: Sentences on unreadable parts, each with its byte offset; complete after
            :meth:`chunks`.
        truncated: Whether reading ended before the last event; the reason is in the last warning.
        events: Number of events read so far.
        skipped: Number of invalid events; only the first one has a warning.
        holes_ns: Begin and end (ns since ``base_ns``) of each period that may lack events: from the
            event before an unreadable part of the file to the event after it.
        impossible: Number of events with a negative duration, or one of more than 30 years.
    """

    def __init__(
        self, path: Path, limits: Limits | None = None, pids: Set[int | str | None] = frozenset()
    ) -> None:
        """Open the file, and read the header before the events.

        Args:
            path: The file.
            limits: Limits on size of the content and on memory.
            pids: Ids of the processes whose events are read; empty for all.

        Raises:
            TraceFormatError: The file cannot be read, or is not a trace.
        """
        self.path = path
        self.warnings: list[str] = []
        self.truncated = False
        self.events = 0
        self.skipped = 0
        self.holes_ns: list[tuple[int, int]] = []
        self.impossible = 0
        self._pids = pids
        self._limits = limits or Limits()
        self._blocks = Blocks(path, self._limits)
        self._source = iter(self._blocks)
        self._buffer = b""
        self._consumed = 0
        self._ended = False
        self._gaps: list[int] = []  # for each unreadable part, the number of events before it
        self._last_us = 0.0
        self._is_object = True
        self.metadata = self._read_header()
        if self._is_object and _BASE not in self.metadata:
            state = path.stat()
            self.metadata.update(_read_end(path, self._limits, (state.st_size, state.st_mtime_ns)))
        self._relative = _BASE in self.metadata
        self.base_ns: int = self.metadata.get(_BASE, 0)
        if type(self.base_ns) is not int or not 0 <= self.base_ns <= MAX_NS:
            raise TraceFormatError(path, f"{_BASE} is not a whole number of ns since 1970")
        kind = list[Event] if self._relative else list[AbsoluteEvent]
        self._decoder: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(kind, strict=False)

    def chunks(self, size: int = BLOCK_BYTES) -> Iterator[list[Event]]:
        """Yield the events in the order of the file, some thousands at a time.

        Invalid events are skipped with a warning. Reading ends at damage, at a cut-off end, or at a
        limit.

        Args:
            size: Bytes of JSON to decode at a time.

        Raises:
            TraceFormatError: The file can no longer be read.
        """
        wanted = size
        while not self._ended:
            last = not self._fill(wanted)
            cut = len(self._buffer) if last else _last_boundary(self._buffer)
            events, used = self._decode(cut, last) if cut or last else ([], 0)
            if not used and not last:
                wanted *= 2
                if wanted > _MOST_EVENT:
                    most = f"no end of an event within {_MOST_EVENT >> 20} MiB"
                    self._stop(self._consumed, f"damaged: {most}")
                    return
                continue
            wanted = size
            self._drop(_past_separator(self._buffer, used))
            events = self._on_base(events)
            self._add_holes(events)
            if self._pids:
                events = [event for event in events if event.pid in self._pids]
            self.events += len(events)
            if events:
                yield events
            if not self._ended and (reached := self._limits.reached(self.events)):
                self._stop(self._consumed, reached)
                return
        self._finish()

    def notes(self) -> Iterator[str]:
        """Yield notes for the report: the notes that this package wrote into the header, and a note
        on impossible durations so far.
        """
        yield from map(str, self.about("notes"))
        if self.impossible:
            yield (
                f"{self.impossible:,} events have a negative or endless duration, and count as 0 s"
            )

    def about(self, key: str) -> list[Any]:
        """Return a list that this package wrote into the header of a trace, e.g. ``notes``; empty
        without one.
        """
        said = self.metadata.get("verl_profiling")
        values = said.get(key) if isinstance(said, dict) else None
        return values if isinstance(values, list) else []

    def _finish(self) -> None:
        """Read the rest of the file after the events, and warn if the file is incomplete."""
        end = b""
        while self._buffer or self._fill(1):
            end = self._buffer.rstrip()[-1:] or end
            self._drop(len(self._buffer))
        if self.skipped > 1:
            self._warn(self._consumed, f"skipped {self.skipped:,} invalid events in all")
        if self._blocks.damage:
            self._stop(self._blocks.position, self._blocks.damage)
        elif not self.truncated and end != (b"}" if self._is_object else b"]"):
            self._stop(self._consumed, "the file is cut off after its events")

    def _read_header(self) -> dict[str, Any]:
        while self._fill(len(self._buffer) + 1):
            text = self._buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text[:1] == b"[":
                self._drop(len(self._buffer) - len(text) + 1)
                self._is_object = False
                return {}
            if text[:1] not in (b"{", b""):
                break
            if match := _EVENTS_KEY.search(self._buffer):
                head = self._buffer[: match.end()]
                self._drop(match.end())
                try:
                    header: dict[str, Any] = _load_json(head + b"]}")
                except (ValueError, RecursionError) as error:
                    raise TraceFormatError(
                        self.path, f"bad JSON before traceEvents ({error})"
                    ) from error
                header.pop("traceEvents", None)
                return header
            if len(self._buffer) > _MOST_HEAD:
                break
        damage = f" ({self._blocks.damage})" if self._blocks.damage else ""
        if not self._buffer.strip():
            raise TraceFormatError(self.path, f"is empty{damage}", 0)
        raise TraceFormatError(self.path, _HINTS.get(self.path.suffix, NO_TRACE) + damage, 0)

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
        """Return the events in the first ``end`` bytes of the buffer,
        and the number of consumed bytes.
        """
        text = memoryview(self._buffer)[:end]
        try:
            if not last:
                return self._decoder.decode(b"".join((b"[", text, b"]"))), end
            close = self._buffer.rfind(b"]")  # nearly always the end of the list
            events = self._decoder.decode(b"".join((b"[", text[: close + 1])))
            self._ended = True
            return events, close
        except UNDECODABLE:
            # The text has the end of the list, or damage.
            return self._decode_each(bytes(text), last)

    def _decode_each(self, text: bytes, last: bool) -> tuple[list[Event], int]:
        """Decode events one by one up to the last complete event; return them and the bytes
        consumed.

        Kineto may write ``NaN`` and names in any encoding, which the fast decoder refuses.
        """
        events: list[Event] = []
        characters = text.decode("latin-1")  # one character per byte, so positions are bytes
        position = 0
        while True:
            position = _past_separator(text, position)
            if text[position : position + 1] == b"]":
                self._ended = True
                return events, position
            try:
                end = _SCANNER.raw_decode(characters, position)[1]
            except (ValueError, RecursionError):
                if following := _next_event(text, characters, position):
                    self._leave_out(
                        text[position:following], self._consumed + position, len(events)
                    )
                    position = following
                    continue
                if last:
                    what = "not closed" if position == len(text) else "damaged or cut off here"
                    self._stop(self._consumed + position, f"the list of events is {what}")
                    position = len(text)
                return events, position
            piece = text[position:end]
            if piece != b"{}":  # JAX writes an empty object after its last event
                try:
                    events += self._decode_one(piece)
                except (*UNDECODABLE, ValueError) as error:
                    self._skip(self._consumed + position, f"skipped an invalid event ({error})")
            position = end

    def _leave_out(self, piece: bytes, offset: int, place: int) -> None:
        """Skip a part of the file that cannot be read, and remember its place for ``holes_ns``.

        torch writes names of annotations verbatim, so a quotation mark ends the string too early.
        Then only this event is lost, and there is no hole.

        Args:
            piece: Content of the part.
            offset: Bytes of content before the part.
            place: Number of the chunk's events before the part.
        """
        if (name := _NAME.match(piece)) and len(_PHASE.findall(piece)) == 1:
            text = name[1].decode("utf-8", "replace")
            self._skip(
                offset, f"skipped the annotation {text}: its name is written without escapes"
            )
            return
        self._gaps.append(place)
        self._skip(offset, f"skipped {byte_size(len(piece))} that cannot be read")

    def _add_holes(self, events: list[Event]) -> None:
        """Add a hole for each unreadable part of a chunk, and remember the begin of the chunk's
        last event, where the next hole may begin.
        """
        if not self._gaps:  # nearly always
            timed = (event.ts for event in reversed(events) if event.ts is not None)
            self._last_us = next(timed, self._last_us)
            return
        begins_us = [self._last_us, *(event.ts for event in events if event.ts is not None)]
        waiting: list[int] = []
        for place in self._gaps:
            before = sum(event.ts is not None for event in events[:place])
            if before + 1 == len(begins_us):
                waiting = [0]  # the next event is in a later chunk
            else:
                self.holes_ns += _between(
                    *(round(us * 1000) for us in begins_us[before : before + 2])
                )
        self._gaps, self._last_us = waiting, begins_us[-1]

    def _decode_one(self, piece: bytes) -> list[Event]:
        try:
            return self._decoder.decode(b"[" + piece + b"]")
        except msgspec.ValidationError as error:
            if not _IMPOSSIBLE.match(str(error)):
                raise
            self.impossible += 1
            return self._decoder.decode(msgspec.json.encode([{**_load_json(piece), "dur": 0}]))
        except UNDECODABLE:
            return self._decoder.decode(msgspec.json.encode([_load_json(piece)]))

    def _on_base(self, events: list[Event]) -> list[Event]:
        if self._relative:
            return events
        with localcontext(_UNTRAPPED):
            timed = [e for e in events if e.ts is None or -_MAX_DECIMAL <= e.ts <= _MAX_DECIMAL]
            if len(timed) < len(events):
                self._skip(
                    self._consumed,
                    "skipped an event with an invalid time",
                    len(events) - len(timed),
                )
            for event in timed:
                if event.ts is None:
                    continue
                if not self.base_ns:
                    self.base_ns = int(event.ts) // 1_000_000 * 1_000_000_000
                event.ts = float(event.ts - self.base_ns // 1000)
        return timed

    def _skip(self, offset: int, message: str, count: int = 1) -> None:
        if not self.skipped:
            self._warn(offset, message)
        self.skipped += count

    def _stop(self, offset: int, reason: str) -> None:
        self._ended = self.truncated = True
        self._warn(offset, reason)

    def _warn(self, offset: int, message: str) -> None:
        self.warnings.append(f"byte {offset}: {message}")


@lru_cache(maxsize=1024)
def _read_end(path: Path, limits: Limits, state: tuple[int, int]) -> dict[str, Any]:
    """Return ``baseTimeNanoseconds`` from the end of the file, where torch 2.3 writes it.

    Args:
        path: The file.
        limits: Limits on reading.
        state: Size and time of the last change, so that a changed file is not taken from the cache.
    """
    tail = b""
    for block in Blocks(path, limits):
        tail = block if len(block) >= _TAIL_BYTES else (tail + block)[-_TAIL_BYTES:]
    values = _BASE_BEHIND.findall(tail)
    try:
        return {_BASE: json.loads(values[-1])} if values else {}
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(path, f"{_BASE} is no number ({error})") from error


def _last_boundary(buffer: bytes) -> int:
    """Return the end of the last event that another event follows, or 0; it is surely complete."""
    for window in (1 << 12, 1 << 16, len(buffer)):
        start = max(0, len(buffer) - window)
        ends = [match.start() + 1 for match in _BOUNDARY.finditer(buffer, start)]
        if ends:
            return ends[-1]
    return 0


def _between(before_ns: int, after_ns: int) -> list[tuple[int, int]]:
    """Return the periods of which events may be missing between two events in the file.

    torch writes one thread after the other. So if the second event is earlier, it is of another
    thread; events may be missing at the end of the first and at the begin of the second.
    """
    if before_ns <= after_ns:
        return [(before_ns, after_ns)]
    return [(-MAX_NS, after_ns), (before_ns, MAX_NS)]


def _next_event(text: bytes, characters: str, position: int) -> int:
    """Return where the first readable event behind a damaged one begins; 0 if there is none."""
    for brace in islice(_OBJECT.finditer(text, position + 1), _MOST_OBJECTS):
        with suppress(ValueError, RecursionError):
            if "ph" in _SCANNER.raw_decode(characters, brace.start())[0]:
                return brace.start()
    return 0


def _past_separator(buffer: bytes, position: int) -> int:
    """Return the end of the comma and white space between two events."""
    match = _SEPARATOR.match(buffer, position)
    return match.end() if match else position


def _load_json(text: bytes) -> Any:
    """Decode JSON; ``NaN`` and ``Infinity`` become ``None``, invalid UTF-8 is replaced.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The text is nested too deeply.
    """
    value = _TOLERANT.decode(text.decode("utf-8-sig", "replace"))
    if b"\\u" not in text:
        return value
    # Half a surrogate pair can be escaped, but not be written.
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
