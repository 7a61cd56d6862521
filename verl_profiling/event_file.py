"""A file of events for TensorBoard, written with tensorboard's own writer: torch is not needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_profiling.errors import ToolUnavailableError

__all__ = ["EventFile"]


class EventFile:
    """Values by step.

    Args:
        logdir: Folder in which TensorBoard finds the file.
        wanted_by: What needs it, to be named in an error.

    Raises:
        ToolUnavailableError: tensorboard is missing.
        OSError: The folder cannot be written.
    """

    def __init__(self, logdir: Path, wanted_by: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ToolUnavailableError(
                f"{wanted_by} needs {error.name}: pip install 'verl-profiling[tensorboard]'"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(logdir))

    def add(self, step: int, scalars: Mapping[str, float], others: Iterable[Any] = ()) -> None:
        """Add a point.

        Args:
            step: The step that it belongs to.
            scalars: Numbers by tag.
            others: Values of a ``Summary`` that are none.
        """
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        summary = self._summary(value=[*values, *others])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Let TensorBoard see what was added."""
        self._writer.flush()

    def close(self) -> None:
        """Write what was added, and close the file."""
        self._writer.close()
