"""Experiment trackers in ``watch.sinks``: TensorBoard, Weights & Biases and MLflow.

A tracker gets the numbers of every step, what the watch noticed, and the report of each captured
step. Its package may raise, block, or need seconds to import, and none of that may reach the loop
or the watch. So each tracker has a thread and a bounded queue, and a late one is left behind.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

import msgspec

from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.files.opener import read_small
from verl_profiling.files.run_files import EventFile, pending_results, read_manifest
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.watch.log_writer import PREFIX, WatchLog, values_of

logger = logging.getLogger(__name__)

_MOST_QUEUED = 1_000
"""Maximum number of steps that wait for a tracker: some megabytes, as ``MOST_WAITING``."""
_LONGEST_CALL_S = 30.0
"""Time (s) for which the end of training waits for one call of a tracker, such as an upload.

The first call imports MLflow, which took 14 s on two busy cores.
"""
_REPORT_S = 600.0  # a step of 64 H100 takes a minute
_STEP = "profiling/step"
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that names of MLflow must not have; one such name fails a whole batch (3.17)."""
_LONGEST_TAG = 5_000  # of MLflow


class _Finding(msgspec.Struct):
    text: str


class _Report(msgspec.Struct):
    """The findings in a ``report.json``."""

    findings: list[_Finding] = []


class TensorBoard:
    """TensorBoard's event file in the folder of a run: curves, and texts."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"

    def open(self) -> None:
        """Begin a file."""
        self._events = EventFile(self._folder, "watch.sinks: tensorboard")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add points to the curves."""
        self._events.add(step, values)

    def note(self, step: int, title: str, text: str) -> None:
        """Add a text."""
        self._events.add_text(step, f"profiling/{title}", text)

    def attach(self, step: int, page: Path, finding: str) -> None:
        """Add a text with the path of the page, as TensorBoard holds no pages."""
        self._events.add_text(step, "profiling/report", f"{finding}\n\n`{page}`")

    def close(self) -> None:
        """Do nothing, as the file is whole after each event."""


class WeightsAndBiases:
    """A run of its own, in the project and the group of the loop's run.

    Points in the loop's run would move its step, and W&B drops points of a step that is over.
    """

    def __init__(self, run: Path) -> None:
        self._name = f"profiling {run.name}"

    def open(self) -> None:
        """Begin a run.

        Raises:
            ToolUnavailableError: Nobody is logged in.
        """
        import wandb

        self._artifact = wandb.Artifact
        loop = wandb.run
        # Without credentials, init() of wandb 0.31.0 asks on the terminal, from this thread, and
        # for ever; the interpreter aborts at its exit. login() without a prompt asks nobody.
        is_online = loop is None and wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False):
            raise ToolUnavailableError("not logged in: wandb login, or WANDB_MODE=offline")
        self._run = wandb.init(
            entity=loop and loop.entity,
            project=loop and loop.project,
            group=loop and (loop.group or loop.name),
            name=self._name,
            job_type="profiling",
            reinit="create_new",
            settings=wandb.Settings(
                console="off", disable_code=True, disable_git=True, x_disable_stats=True
            ),
        )
        self._run.define_metric(f"{PREFIX}*", step_metric=_STEP)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curves, over the loop's step."""
        self._run.log({_STEP: step, **values})

    def note(self, step: int, title: str, text: str) -> None:
        """Send an alert, which is in the run's log, too."""
        self._run.alert(title=f"{title} in step {step}", text=text)

    def attach(self, step: int, page: Path, finding: str) -> None:
        """Add an artifact: the page, described by the finding."""
        name = f"profiling-{self._run.id}-{page.parent.name}"
        artifact = self._artifact(name, type="profiling", description=finding)
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """End the run, which uploads the rest."""
        self._run.finish()


class MLflow:
    """The loop's active run of MLflow, else a run of its own."""

    def __init__(self, run: Path) -> None:
        self._name = f"profiling {run.name}"
        package = sys.modules.get("mlflow")  # the active run is of the calling thread alone
        active = None if package is None else package.active_run()
        self._is_own = active is None
        self._id = "" if active is None else active.info.run_id

    def open(self) -> None:
        """Begin a run, in the experiment of MLflow's environment variables, unless there is one."""
        import mlflow
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = mlflow.MlflowClient()
        if self._is_own:
            named = os.environ.get("MLFLOW_EXPERIMENT_NAME")
            experiment = mlflow.set_experiment(named).experiment_id if named else "0"
            self._id = self._client.create_run(experiment, run_name=self._name).info.run_id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add points of metrics."""
        now_ms = int(time.time() * 1e3)
        metrics = []
        for name, value in values.items():
            metrics.append(self._metric(_NOT_IN_MLFLOW.sub("_", name), value, now_ms, step))
        self._client.log_batch(self._id, metrics=metrics)

    def note(self, step: int, title: str, text: str) -> None:
        """Set a tag, which the page of the run shows."""
        self._client.set_tag(self._id, f"profiling/{title}/step {step}", text[:_LONGEST_TAG])

    def attach(self, step: int, page: Path, finding: str) -> None:
        """Add the page as an artifact, and the finding as a tag."""
        self._client.log_artifact(self._id, str(page), f"profiling/{page.parent.name}")
        self.note(step, "finding", finding)

    def close(self) -> None:
        """End the run if it is not the loop's."""
        if self._is_own:
            self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""Trackers by name: made on the loop's thread, and used on a thread of their own."""


class TrackerLog:
    """Passes step summaries to a tracker, on a thread; call it with the summaries.

    The tracker is opened with the first step, when the loop has begun its own run.

    Args:
        name: Name of the tracker in ``watch.sinks``.
        run: The run's folder.
        reporting: Held while a report is written, which all trackers use.
    """

    def __init__(self, name: str, run: Path, reporting: threading.Lock) -> None:
        self._name = name
        self._run = run
        self._reporting = reporting
        self._queue: Queue[StepSummary | None] = Queue(_MOST_QUEUED)
        self._tracker = TRACKERS[name](run)
        self._is_open = False
        self._captures: list[tuple[int, Path]] = []
        self._said: set[str] = set()
        self._call_s = inf  # when the present call of the tracker began
        self._thread = threading.Thread(
            target=self._work, name=f"verl-profiling-{name}", daemon=True
        )
        self._thread.start()

    def __call__(self, *summaries: StepSummary) -> None:
        """Queue summaries, without waiting; a tracker that is too slow misses some."""
        if not self._thread.is_alive():
            return
        for summary in summaries:
            try:
                self._queue.put_nowait(summary)
            except Full:
                self._say_once("is too slow, and misses steps")

    def end(self, timeout_s: float) -> None:
        """Wait until all is passed on, unless one call of the tracker takes too long."""
        with suppress(Empty):
            if self._queue.full():
                self._queue.get_nowait()
        self._queue.put(None)
        until_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < until_s:
            if time.monotonic() - self._call_s > _LONGEST_CALL_S:
                self._say_once("does not answer, and training ends without it")
                return
            self._thread.join(0.05)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("watch.sinks: %s %s", self._name, what)

    def _work(self) -> None:
        summary = self._queue.get()
        if summary is not None:
            self._try(self._open)
        if not self._is_open:
            return
        while summary is not None:
            self._try(self._pass_on, summary)
            summary = self._queue.get()
        self._try(self._attach_reports, True)
        self._try(self._tracker.close)

    def _try(self, call: Callable[..., object], *given: object) -> None:
        self._call_s = time.monotonic()
        try:
            call(*given)
        except ImportError as error:
            self._say_once(f"needs {error.name}: pip install 'verl-profiling[{self._name}]'")
        except Exception as error:
            self._say_once(f"failed: {type(error).__name__}: {error}")
        self._call_s = inf

    def _open(self) -> None:
        self._tracker.open()
        self._is_open = True

    def _pass_on(self, summary: StepSummary) -> None:
        """Pass on a step, what was noticed in it, and the reports that can be written by now."""
        if summary.hangs:
            self._tracker.note(summary.step, "hang", summary.hangs)
        if not summary.end_ns:
            return
        self._tracker.add(summary.step, values_of(summary))
        noticed = summary.noticed
        if noticed is not None:
            self._tracker.note(summary.step, noticed.sign, noticed.reason)
        if summary.captured:
            self._captures.append((summary.step, self._run / summary.captured))
        self._attach_reports()

    def _attach_reports(self, is_end: bool = False) -> None:
        """Attach the reports of captures whose files are complete; at the end, of all."""
        captures, self._captures = self._captures, []
        for step, folder in captures:
            if is_end or _is_complete(folder):
                self._call_s = inf  # the report is our own work
                finding = self._reported(folder)
                self._call_s = time.monotonic()
                self._tracker.attach(step, folder / "report.html", finding)
            else:
                self._captures.append((step, folder))

    def _reported(self, folder: Path) -> str:
        """Write the report of a step in a process of low priority; return its first finding.

        Raises:
            TraceFormatError: The step has no report.
        """
        document = folder / "report.json"
        command = [sys.executable, "-m", "verl_profiling.cli", "report", str(folder), "--save"]
        with self._reporting:
            if not document.exists():
                done = subprocess.run(
                    ["nice", "-n", "19", *command],
                    capture_output=True,
                    text=True,
                    timeout=_REPORT_S,
                    check=False,
                )
                if not document.exists():
                    raise TraceFormatError(folder, f"no report: {done.stderr.strip()}")
        findings = msgspec.json.decode(read_small(document), type=_Report).findings
        return findings[0].text if findings else "nothing stands out"


def _is_complete(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
    except (OSError, TraceFormatError):  # it is not written yet
        return False
    return manifest.state != "begun" and not pending_results(manifest)


class RunLogs:
    """The receivers of a run's step summaries: its log, and the trackers of ``watch.sinks``.

    Args:
        run: The run's folder.
        sinks: Names of trackers.
    """

    def __init__(self, run: Path, sinks: Sequence[str]) -> None:
        reporting = threading.Lock()
        self._log = WatchLog(run)
        self._trackers = [TrackerLog(name, run, reporting) for name in sinks]

    def __call__(self, *summaries: StepSummary) -> None:
        """Write summaries into the log, and queue them for the trackers."""
        self._log(*summaries)
        for tracker in self._trackers:
            tracker(*summaries)

    def end(self, timeout_s: float) -> None:
        """Wait for the trackers, each in turn."""
        for tracker in self._trackers:
            tracker.end(timeout_s)
