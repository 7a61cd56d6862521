"""Where the numbers of each step go besides the log: one small interface, and what is known to have it.

W&B and MLflow are used only where the user's process has a run of theirs that is active. Nothing is imported
for it, nobody is logged in, and no run is made.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.event_file import EventFile
from verl_profiling.watch.values import PREFIX

__all__ = ["MlflowSink", "Sink", "TensorBoardSink", "WandbSink", "open_sink"]

_MOST_WAITING = 1000
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]", re.ASCII)


class Sink(Protocol):
    """Takes the numbers of steps, in order, on a thread that is not the loop's."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step. Whatever it raises switches the sink off, and is said once."""

    def close(self) -> None:
        """Training has ended."""


class TensorBoardSink:
    """Writes a file of events.

    Args:
        logdir: Its folder.

    Raises:
        ToolUnavailableError: tensorboard is missing.
        OSError: The folder cannot be written.
    """

    def __init__(self, logdir: Path) -> None:
        self._file = EventFile(logdir, "watch.sinks: tensorboard")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        self._file.add(step, values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbSink:
    """Adds to the rows that the user logs to W&B; it begins none, so the user's steps are as they were.

    A row holds one step of ours, and the curves have a step of their own, ``profiling/watch/step``.

    Raises:
        ToolUnavailableError: The process has no active run.
    """

    def __init__(self) -> None:
        run: Any = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            raise ToolUnavailableError("this process has no active run of W&B; call wandb.init() before")
        self._run = run
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        self._waiting: deque[dict[str, float]] = deque(maxlen=_MOST_WAITING)
        self._row: int | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step to the row that is open, if that has none; else it waits for the next row."""
        self._waiting.append({f"{PREFIX}step": step, **values})
        self._add()

    def close(self) -> None:
        """Add what fits."""
        if self._waiting:
            self._add()

    def _add(self) -> None:
        if self._run.step != self._row:
            self._row = self._run.step
            self._run.log(self._waiting.popleft(), commit=False)


class MlflowSink:
    """Logs to the run of MLflow that is active on the thread that makes it.

    Raises:
        ToolUnavailableError: There is none.
    """

    def __init__(self) -> None:
        mlflow: Any = sys.modules.get("mlflow")
        run = mlflow.active_run() if mlflow is not None else None
        if run is None:
            raise ToolUnavailableError(
                "this thread has no active run of MLflow; call mlflow.start_run() before"
            )
        self._run_id = run.info.run_id
        self._client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step."""
        now_ms = round(time.time() * 1000)
        metrics = [
            self._metric(_NOT_IN_MLFLOW.sub("_", name), value, now_ms, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Leave the run as it is: it is the user's."""


def open_sink(name: str, folder: Path) -> Sink:
    """Open a sink, on the thread of the loop.

    Args:
        name: ``tensorboard``, ``wandb``, ``mlflow`` or ``"package.module:Class"``.
        folder: The run's folder.

    Raises:
        ToolUnavailableError: It cannot be had in this process.
        Exception: Whatever a class of the user's own raises.
    """
    if name == "tensorboard":
        return TensorBoardSink(folder / "tensorboard")
    if name == "wandb":
        return WandbSink()
    if name == "mlflow":
        return MlflowSink()
    module, _, attribute = name.partition(":")
    sink: Sink = getattr(import_module(module), attribute)()
    return sink
