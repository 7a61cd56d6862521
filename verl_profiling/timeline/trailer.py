"""Reads the keys after the events of a trace, where ``json.dump`` of a modified trace puts them."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.decompress import Blocks
from verl_profiling.timeline.salvage import load_json

__all__ = ["read_trailer"]

_TAIL_BYTES = 1 << 18
_KEYS = ("baseTimeNanoseconds", "distributedInfo", "host_name", "traceName")


def read_trailer(path: Path, limit: int | None = None) -> dict[str, Any]:
    """Return the known top-level keys at the end of a trace.

    Args:
        path: The trace.
        limit: Bytes of its content to read at most.

    Raises:
        TraceFormatError: The file cannot be read.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read ({error.strerror or error})") from error
    return dict(_read(path, state.st_size, state.st_mtime_ns, limit))


@lru_cache(maxsize=1024)
def _read(path: Path, size: int, mtime_ns: int, limit: int | None) -> dict[str, Any]:
    """Read the end of a file in its present state; a compressed one is read from its beginning."""
    tail = b""
    for block in Blocks(path, limit=limit, from_end=_TAIL_BYTES):
        tail = (tail + block)[-_TAIL_BYTES:]
    text = tail.decode("utf-8", "replace")
    found: dict[str, Any] = {}
    for key in _KEYS:
        for match in re.finditer(rf'"{key}"\s*:\s*', text):
            try:
                _, end = json.JSONDecoder().raw_decode(text, match.end())
                found[key] = load_json(text[match.end() : end].encode())
            except (ValueError, RecursionError):
                continue  # the file is truncated inside the value, or it is nested without end
    return found
