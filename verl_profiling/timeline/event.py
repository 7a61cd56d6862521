"""One event of a trace, decoded no further than needed."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import msgspec

from verl_profiling.timeline.limits import LONGEST_US, MAX_US
from verl_profiling.timeline.salvage import UNDECODABLE

__all__ = ["NO_ARGS", "AbsoluteEvent", "Event"]

NO_ARGS = msgspec.Raw(b"")

_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str | int)


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
        """Return one of the arguments as text; ``""`` if there is none of this name, or it is no text."""
        try:
            return str(_TEXT.decode(_ARGUMENTS.decode(self.args)[key]))
        except (*UNDECODABLE, KeyError):
            return ""


class AbsoluteEvent(Event):
    """An event of a trace without a base; its time is exact until it becomes one with a base."""

    ts: Decimal | None = None  # type: ignore[assignment]  # converted to a float before the event is handed out
