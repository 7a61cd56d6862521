"""A file of events for TensorBoard, in tensorboard's own format: torch is not needed, and no thread."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_profiling.errors import ToolUnavailableError


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
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ToolUnavailableError(
                f"{wanted_by} needs {error.name}: pip install 'verl-profiling[tensorboard]'"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        logdir.mkdir(parents=True, exist_ok=True)
        source = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        path = logdir / f"events.out.tfevents.{int(time.time()):010d}.{source}"
        self._path, self._writer = path, RecordWriter
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point.

        Args:
            step: The step that it belongs to.
            scalars: Numbers by tag.

        Raises:
            OSError: The disk is full.
        """
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _write(self, event: Any) -> None:
        with self._path.open("ab") as file:
            self._writer(file).write(event.SerializeToString())
