"""Names that other programs gave, safe to print: control and bidirectional characters are written out."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def visible(text: str) -> str:
    r"""Return a text with everything that is not printable written as Python does: ``\x1b``, ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def visible_text_of(value: T) -> T:
    """Return a structure with all of its texts, keys included, as :func:`visible` shows them."""
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
