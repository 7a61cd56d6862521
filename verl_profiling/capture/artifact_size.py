"""The bytes that a worker's artifacts may take of the disk: what is larger is cut, or removed."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.manifest import Artifact
from verl_profiling.settings.limits import Limits
from verl_profiling.tools import Output
from verl_profiling.units import byte_size

__all__ = ["ByteBudget"]

logger = logging.getLogger(__name__)

_READABLE_WHEN_CUT = (".json", ".json.gz")


class ByteBudget:
    """What a worker may still write into a step folder.

    Args:
        limits: The limits.
        request: The capture.
        artifacts: How many artifacts share what the worker may write.
    """

    def __init__(self, limits: Limits, request: CaptureRequest, artifacts: int = 1) -> None:
        self._each = limits.artifact_bytes
        self._left = None
        if limits.step_bytes is not None:
            self._left = limits.step_bytes // request.workers
            self._share = (
                f"limits.step_bytes={byte_size(limits.step_bytes)} is "
                f"{byte_size(self._left)} for each of {request.workers} workers"
            )
        self._folder = Path(request.folder)
        self._artifacts = artifacts

    def bound(self, output: Output) -> Output:
        """Return an output whose file keeps within the budget once it is finished."""
        if self._each is None and self._left is None:
            return output
        finish = output.finish
        if finish is None:
            return replace(output, artifact=self._bounded(output.artifact))
        return replace(output, finish=lambda: self._bounded(finish()))

    def _bounded(self, artifact: Artifact) -> Artifact:
        path = self._folder / artifact.path
        if artifact.status not in ("ok", "truncated") or not path.exists():
            return artifact
        size = _size(path)
        most: int | None = self._each
        why = f"limits.artifact_bytes={byte_size(most or 0)}"
        if self._left is not None:
            share = self._left // max(1, self._artifacts)
            self._artifacts -= 1
            if most is None or share < most:
                most, why = share, self._share
        if most is not None and size > most:
            artifact = _cut(path, artifact, size, most, why)
        if self._left is not None:
            self._left -= artifact.bytes or 0
        return artifact


def _cut(path: Path, artifact: Artifact, size: int, most: int, why: str) -> Artifact:
    """Keep the begin of a trace, which readers can use; of anything else, nothing."""
    if path.is_file() and path.name.endswith(_READABLE_WHEN_CUT) and most:
        os.truncate(path, most)
        reason = f"cut to {byte_size(most)} of {byte_size(size)}: {why}"
        logger.warning("%s: %s", path, reason)
        return msgspec.structs.replace(artifact, status="truncated", bytes=most, events=None, reason=reason)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    reason = (
        f"removed: its {byte_size(size)} are more than {byte_size(most)}, and part of it is of no use: {why}"
    )
    logger.warning("%s: %s", path, reason)
    return msgspec.structs.replace(artifact, status="failed", bytes=None, events=None, reason=reason)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
