"""Finds the recordings in folders of torch_npu.

A recording is a folder ``*_ascend_pt``. Its analysis writes a trace, a database, or both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

RECORDING_SUFFIX = "_ascend_pt"
_TRACE = "trace_view.json"
_DATABASES = "ascend_pytorch_profiler*.db"


def npu_files(folder: Path) -> Iterator[Path]:
    """Yield the file to read of each analysed recording in a folder: the trace,
    else the database.
    """
    yield from sorted(folder.rglob(_TRACE))
    for database in sorted(folder.rglob(_DATABASES)):
        if not database.with_name(_TRACE).exists():
            yield database


def not_analysed(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each recording in a folder without a file to read,
    with the command that analyses it.
    """
    for path, *_ in sorted(os.walk(folder)):
        if path.endswith(RECORDING_SUFFIX) and next(npu_files(Path(path)), None) is None:
            call = f"from torch_npu.profiler.profiler import analyse; analyse({path!r})"
            yield Path(path), f'is missing: torch_npu has not analysed it; run: python -c "{call}"'
