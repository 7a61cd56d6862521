"""Finds what stands behind the events of a trace, where ``json.dump`` of a changed trace puts it."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.blocks import Blocks

__all__ = ["read_trailer"]

_TAIL_BYTES = 1 << 18
_KEYS = ("baseTimeNanoseconds", "distributedInfo", "host_name", "traceName")


def read_trailer(path: Path) -> dict[str, Any]:
    """Return the known top-level keys at the end of a trace.

    Raises:
        TraceFormatError: The file cannot be read.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read ({error.strerror or error})") from error
    return dict(_read(path, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=1024)
def _read(path: Path, size: int, mtime_ns: int) -> dict[str, Any]:
    """Read a file as it is at this time: a compressed one has to be read from its beginning."""
    tail = b""
    for block in Blocks(path, from_end=_TAIL_BYTES):
        tail = (tail + block)[-_TAIL_BYTES:]
    text = tail.decode("utf-8", "replace")
    found: dict[str, Any] = {}
    for key in _KEYS:
        for match in re.finditer(rf'"{key}"\s*:\s*', text):
            try:
                found[key], _ = json.JSONDecoder().raw_decode(text, match.end())
            except ValueError:
                continue  # a truncated file: the value is cut off
    return found
