"""Names in a recording of torch_npu, which is a folder ``*_ascend_pt``."""

from __future__ import annotations

import re
from pathlib import Path

RECORDING_SUFFIX = "_ascend_pt"
_INFO = re.compile(r"profiler_info_(\d+)\.json")


def is_recording(path: Path) -> bool:
    """Return whether a path is a recording of torch_npu."""
    return path.name.endswith(RECORDING_SUFFIX) and path.is_dir()


def rank_of_recording(path: Path) -> int | None:
    """Return the rank in the file names of a recording; ``None`` without a rank."""
    for file in path.iterdir():
        if match := _INFO.fullmatch(file.name):
            return int(match[1])
    return None
