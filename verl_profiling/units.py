"""Formats times, sizes, lists of steps and names from files for people."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
# No quote: a text of JSON ends there.
_PASSWORD = re.compile(rb"""(://[^\s"'/@:]*:)[^\s"'/@]+(?=@)""")
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


def duration(seconds: float, *, signed: bool = False) -> str:
    """Return a time with a suitable unit: ``1,234 s``, ``1.23 s``, ``12.3 ms``, ``123 us``, ``0
    s``.

    Args:
        seconds: The time (s).
        signed: Whether to write ``+`` before a time greater than 0.
    """
    if abs(seconds) < 5e-10:  # clocks count nanoseconds: less is the rest of a sum of floats
        return "0 s"
    unit, scale = _unit(seconds, _TIMES)
    return f"{'+' if signed and seconds > 0 else ''}{three_digits(seconds / scale)} {unit}"


def byte_size(size: float) -> str:
    """Return a number of bytes with a suitable unit: ``2 GB``, ``12.3 MB``, ``512 bytes``."""
    unit, scale = _unit(size, _SIZES)
    number = three_digits(size / scale)
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def local_time(unix_ns: int) -> str:
    """Return a time (unix ns) as local date and time: ``2026-11-24 02:06:01``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns / 1e9))


def step_list(steps: Sequence[int]) -> str:
    """Return ``step 3``, or ``steps 3, 5, 8 and 2 more`` after the first ten."""
    return f"{'step' if len(steps) == 1 else 'steps'} {listed(list(map(str, steps)), 10)}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and the number of further names: ``a, b, c and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """Return the largest unit in which a value, rounded to three digits, is at least 1."""
    return next((unit for unit in units if abs(value) >= 0.9995 * unit[1]), units[-1])


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all digits before its decimal point: ``1.23``,
    ``0.012``, ``1,234``.
    """
    size = abs(value)
    if size < 0.9995:  # less than one of the smallest unit
        return f"{value:.3g}"
    digits = (size < 9.995) + (size < 99.95)
    return f"{value:,.{digits}f}"


def visible(text: str) -> str:
    r"""Return a text to show: control and bidirectional characters are escapes, such as ``\x1b``.

    Passwords in URLs are masked.
    """
    if "://" in text:
        text = without_passwords(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_passwords(text: bytes) -> bytes:
    """Return UTF-8 text, such as JSON, with ``***`` in place of passwords in URLs."""
    return _PASSWORD.sub(rb"\1***", text)


def visible_text_of(value: T) -> T:
    """Return a structure with :func:`visible` applied to all texts, including keys."""
    shown: T = msgspec.convert(_shown(msgspec.to_builtins(value)), type(value))
    return shown


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return value


NAME_LENGTH = 120
"""Most characters of a name in the timeline and in reports."""


def shortened(name: str) -> str:
    """Return a name cut to 120 characters."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
