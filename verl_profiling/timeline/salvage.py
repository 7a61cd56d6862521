"""Reads a damaged stretch of a list of events, event by event, and tells what it had to skip.

It is more tolerant than the decoder of whole stretches: it accepts ``NaN``, invalid UTF-8 and halves
of surrogate pairs. All positions are bytes, because each byte is looked at as one character.
"""

from __future__ import annotations

import json
import re
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["UNDECODABLE", "Salvage", "load_json"]

E = TypeVar("E")

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the decoder of whole stretches raises for bytes of any kind."""

_SEPARATOR = re.compile(rb"[\s,]*")
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_SCANNER = json.JSONDecoder()
_TOLERANT = json.JSONDecoder(parse_constant=lambda name: None)
_NEAR_BYTES = 1 << 16


class Salvage(Generic[E]):
    """The events of one damaged stretch.

    Attributes:
        events: What could be read.
        used: Bytes that were consumed.
        ended: Whether the list of events ends there; the byte behind those used closes it.
        cut: Where and how the content ends inside the list, if it does.
        skipped: Position and reason of each thing that is not an event.
    """

    def __init__(self, text: bytes, decoder: msgspec.json.Decoder[list[E]], last: bool) -> None:
        """Read a stretch.

        Args:
            text: It begins at an event or at a separator.
            decoder: Decodes events.
            last: Whether nothing follows the stretch.
        """
        self.events: list[E] = []
        self.used = 0
        self.ended = False
        self.cut: tuple[int, str] | None = None
        self.skipped: list[tuple[int, str]] = []
        self._decoder = decoder
        self._read(text, last)

    def _read(self, text: bytes, last: bool) -> None:
        characters, position, start = text.decode("latin-1"), 0, 0
        while True:
            position = self._past_separator(text, position)
            if position == len(text) or text[position] == ord("]"):
                self.ended = position < len(text)
                if last and not self.ended:
                    self.cut = position, "the list of events is not closed: the file is truncated"
                break
            if position - start > _NEAR_BYTES:  # the scanner's errors count the lines before them
                characters, start = text[position:].decode("latin-1"), position
            try:
                end = start + _SCANNER.raw_decode(characters, position - start)[1]
            except (ValueError, RecursionError) as error:
                problem = getattr(error, "msg", str(error))
                following = _BOUNDARY.search(text, start + getattr(error, "pos", position + 1 - start))
                if following is None:
                    if last:
                        self.cut = position, "the last event is cut off: the file is truncated"
                        position = len(text)
                    break
                self.skipped.append((position, f"skipped an unreadable event ({problem})"))
                position = following.end()
            else:
                self._take(text[position:end], position)
                position = end
        self.used = position

    def _past_separator(self, text: bytes, position: int) -> int:
        found = _SEPARATOR.match(text, position)
        end = found.end() if found else position
        if text.count(b",", position, end) > 1:
            self.skipped.append((position, "skipped commas with nothing between them"))
        return end

    def _take(self, piece: bytes, position: int) -> None:
        if piece == b"{}":
            return  # JAX writes one behind its last event
        try:
            self.events += self._decoder.decode(b"[" + piece + b"]")
        except msgspec.ValidationError as error:
            self.skipped.append((position, f"skipped something that is not an event ({error})"))
        except UNDECODABLE:
            try:
                self.events += self._decoder.decode(msgspec.json.encode([load_json(piece)]))
            except (*UNDECODABLE, ValueError) as error:
                self.skipped.append((position, f"skipped something that is not an event ({error})"))


def load_json(text: bytes) -> Any:
    """Decode JSON without what JSON does not know; numbers that are none become ``None``.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deeply.
    """
    value = _TOLERANT.decode(text.decode("utf-8-sig", "replace"))
    if b"\\u" not in text:
        return value
    # Half a surrogate pair can be escaped, but not be written.
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
