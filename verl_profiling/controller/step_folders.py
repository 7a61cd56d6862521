"""Creates step folders, writes their manifests, and updates them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from verl_profiling.capture.messages import Finished
from verl_profiling.controller.beside import BesideWriter
from verl_profiling.controller.node_local import located
from verl_profiling.controller.run_claim import RunFolder, claim_run_folder, continues
from verl_profiling.controller.run_record import RunRecord
from verl_profiling.controller.trace import write_controller_trace
from verl_profiling.identity import ProcessId, step_folder_name
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    ArtifactStatus,
    CaptureResult,
    Manifest,
    worst_fate,
)
from verl_profiling.run_files import read_manifest, write_json_atomically
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["StepFolders", "WrittenStep"]

_INCOMPLETE = 16  # of the steps in which an engine was late, so many are remembered


@dataclass
class WrittenStep:
    """A step folder, and what its manifest says."""

    folder: Path
    manifest: Manifest


class StepFolders:
    """Writes the run's folder, which is claimed when first needed.

    All methods raise ``OSError`` when it cannot be written.

    Args:
        config: The settings; ``save_path`` is the run's folder unless another run has it.

    Attributes:
        record: What is on record of the run, once its folder is claimed.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self._config = config
        self._run: RunFolder | None = None
        self.record: RunRecord | None = None
        self._beside = BesideWriter()
        self._last: WrittenStep | None = None
        self._unfinished: list[WrittenStep] = []
        self._incomplete: list[WrittenStep] = []
        self._node_local: set[str] = set()

    @property
    def run(self) -> RunFolder:
        """The run's folder."""
        return self._run or self._claim()

    def train_begins(self) -> None:
        """Put this start of the run on record, if an earlier one is, whatever will be captured."""
        if self._run is None and continues(self._config):
            self._claim()

    def is_written(self, folder: Path) -> bool:
        """Return whether all of a step is where it belongs, as far as this process sees to it."""
        remote = self._run.remote if self._run is not None else None
        return folder not in self.unfinished and (remote is None or remote.is_published(folder))

    def drain(self, timeout_s: float) -> None:
        """Wait for uploads."""
        if self._run is not None and self._run.remote is not None:
            self._run.remote.drain(timeout_s)

    def leave(self) -> None:
        """Remove from this host what was uploaded."""
        if self._run is not None and self._run.remote is not None:
            self._run.remote.leave()

    @property
    def unfinished(self) -> set[Path]:
        """The step folders of which artifacts are still being finished."""
        return {written.folder for written in self._unfinished}

    def path(self, step: int) -> Path:
        """Return the folder of a step that is not kept."""
        return self.run.path / step_folder_name(step)

    def make(self, step: int) -> Path:
        """Make the folder of a step: a new one, where the step was recorded before."""
        for recording in count(1):
            folder = self.run.path / step_folder_name(step, recording)
            if self.run.remote is not None and folder.name in self.run.remote.steps:
                continue
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return folder
        raise AssertionError("count() ends")

    def notes_on(self, folder: Path, step: int) -> list[str]:
        """Return what a user should know of a folder that was made for a step."""
        first = step_folder_name(step)
        if folder.name == first:
            return []
        return [f"step {step} was recorded before, in {first}; this is start {self.run.start} of the run"]

    def begin(self, folder: Path, manifest: Manifest) -> None:
        """Write what is expected of a capture that begins, while the loop goes on."""
        manifest = msgspec.structs.replace(
            manifest, state="begun", start=self.run.start, process=ProcessId.current()
        )
        self._beside.write(folder / MANIFEST_NAME, manifest)

    def write(self, folder: Path, manifest: Manifest) -> WrittenStep:
        """Write the controller's trace, then the manifest."""
        self._beside.settle()
        manifest = msgspec.structs.replace(manifest, start=self.run.start, process=ProcessId.current())
        manifest = self._located(folder, manifest)
        write_controller_trace(folder, manifest)
        write_json_atomically(folder / MANIFEST_NAME, manifest)
        self._last = WrittenStep(folder, manifest)
        self._remember(self._last)
        self._publish(self._last)
        return self._last

    def replace_worker(self, written: WrittenStep, result: CaptureResult) -> None:
        """Put a worker's result into a manifest in the place of the one that was written."""
        workers = [
            _with_finished(result, worker.artifacts) if worker.name == result.name else worker
            for worker in written.manifest.workers
        ]
        self._change(written, msgspec.structs.replace(written.manifest, workers=workers))

    def update(self, folder: Path, change: Callable[[Manifest], Manifest]) -> None:
        """Change the manifest of a capture that was written."""
        known = (written for written in (self._last, *self._unfinished) if written is not None)
        written = next((w for w in known if w.folder == folder), None)
        if written is None:
            written = WrittenStep(folder, read_manifest(folder))
        self._change(written, change(written.manifest))

    def wrote_last(self, step: int) -> bool:
        """Return whether the capture that was written last is of that step."""
        return self._last is not None and step in self._last.manifest.steps

    def add_metrics(self, step: int, metrics: dict[str, float], notes: list[str]) -> None:
        """Add numbers of a step, and notes on them, to the manifest that was written last."""
        written = self._last
        if written is None:
            return
        manifest = written.manifest
        spans = [
            msgspec.structs.replace(span, metrics={**span.metrics, **metrics}) if span.step == step else span
            for span in manifest.step_spans
        ]
        written.manifest = msgspec.structs.replace(
            manifest,
            step_spans=spans,
            metrics={**manifest.metrics, **metrics},
            notes=[*manifest.notes, *notes],
        )
        write_json_atomically(written.folder / MANIFEST_NAME, written.manifest)
        self._publish(written)

    def note(self, finished: Finished) -> None:
        """Enter the final status of an artifact; after the last one the manifest is rewritten."""
        for written in (*self._unfinished, *self._incomplete):
            manifest = written.manifest
            if finished.capture_id.partition("/")[0] == manifest.capture_id:
                workers = [_with_artifact(worker, finished.artifact) for worker in manifest.workers]
                written.manifest = msgspec.structs.replace(manifest, workers=workers)
                if written.manifest != manifest and not _pending(written.manifest):
                    self._rewrite(written)
                return

    def pending_workers(self) -> set[str]:
        """Return the names of the workers that may still finish an artifact, as far as is known."""
        return {
            worker.name
            for written in (*self._unfinished, *self._incomplete)
            for worker in written.manifest.workers
            if any(_may_come(worker, artifact) for artifact in worker.artifacts)
        }

    def flush(self) -> None:
        """Write what became of artifacts that nobody has finished: from now on, the files decide.

        What is on another host, or still to be uploaded, stays pending, and says where it is.
        """
        unfinished, self._unfinished = self._unfinished, []
        for written in unfinished:
            manifest = self._located(written.folder, written.manifest, ended=True)
            workers = [_as_on_disk(written.folder, worker) for worker in manifest.workers]
            written.manifest = msgspec.structs.replace(manifest, workers=workers)
            write_json_atomically(written.folder / MANIFEST_NAME, written.manifest)
            self._publish(written)

    def _claim(self) -> RunFolder:
        self._run = claim_run_folder(self._config)
        self.record = RunRecord(self._run)
        self.record.enter()
        return self._run

    def _change(self, written: WrittenStep, manifest: Manifest) -> None:
        written.manifest = manifest = self._located(written.folder, manifest)
        write_controller_trace(written.folder, manifest)
        write_json_atomically(written.folder / MANIFEST_NAME, manifest)
        self._remember(written)
        self._publish(written)

    def _remember(self, written: WrittenStep) -> None:
        """Keep a step of which something may still come."""
        self._unfinished = [step for step in self._unfinished if step is not written]
        self._incomplete = [step for step in self._incomplete if step is not written]
        manifest = written.manifest
        if _pending(manifest):
            self._unfinished.append(written)
        elif any(_may_come(worker, artifact) for worker in manifest.workers for artifact in worker.artifacts):
            self._incomplete = [*self._incomplete, written][-_INCOMPLETE:]

    def _rewrite(self, written: WrittenStep) -> None:
        written.manifest = self._located(written.folder, written.manifest)
        write_json_atomically(written.folder / MANIFEST_NAME, written.manifest)
        self._remember(written)
        self._publish(written)

    def _located(self, folder: Path, manifest: Manifest, ended: bool = False) -> Manifest:
        """Return a manifest that says where artifacts are; the run's file names hosts that keep theirs."""
        remote = self.run.remote is not None
        manifest = located(folder, manifest, remote=remote, ended=ended)
        hosts = {
            artifact.where.partition(":")[0]
            for worker in manifest.workers
            for artifact in worker.artifacts
            if artifact.where
        }
        if hosts - self._node_local and not remote:
            self._node_local |= hosts
            if self.record is not None:
                self.record.files_stay_on(self._node_local)
        return manifest

    def _publish(self, written: WrittenStep) -> None:
        """Upload a step's manifest once nothing is left to do on its artifacts."""
        if self.run.remote is not None and written.folder not in self.unfinished:
            self.run.remote.publish(written.folder, written.manifest)


def _pending(manifest: Manifest) -> bool:
    return any(artifact.status == "pending" for worker in manifest.workers for artifact in worker.artifacts)


def _may_come(worker: CaptureResult, artifact: Artifact) -> bool:
    """Return whether an artifact is being finished, or an engine may still write it."""
    late = worker.identity.is_engine and artifact.status in ("failed", "missing")
    return late or artifact.status == "pending"


def _as_on_disk(folder: Path, worker: CaptureResult) -> CaptureResult:
    """Return a worker without artifacts that wait for being compressed; nobody does it any more."""

    def settled(artifact: Artifact) -> Artifact:
        if artifact.status != "pending" or artifact.reason or artifact.where:  # it waits for something else
            return artifact
        path, raw = folder / artifact.path, folder / artifact.path.removesuffix(".gz")
        if path.exists() or not raw.exists():
            reason = "" if path.exists() else "nobody said what became of it by the end of training"
            status: ArtifactStatus = "ok" if path.exists() else "missing"
            return msgspec.structs.replace(artifact, status=status, reason=reason)
        reason = "it was not compressed by the end of training (timeouts.finish_s)"
        return msgspec.structs.replace(artifact, status="ok", bytes=raw.stat().st_size, reason=reason)

    return _with_artifacts(worker, [settled(artifact) for artifact in worker.artifacts])


def _with_finished(result: CaptureResult, known: Iterable[Artifact]) -> CaptureResult:
    """Return a result in which artifacts are finished that are known to be."""
    for artifact in known:
        if artifact.status not in ("pending", "missing", "failed"):
            result = _with_artifact(result, artifact)
    return result


def _with_artifact(worker: CaptureResult, finished: Artifact) -> CaptureResult:
    def updated(artifact: Artifact) -> Artifact:
        if not artifact.is_run_of(finished):
            return artifact
        late = artifact.status in ("failed", "missing") and finished.status in ("ok", "truncated", "empty")
        if artifact.status != "pending" and not late:
            return artifact
        reason = f"it came late: {artifact.reason}" if late and finished.status == "ok" else finished.reason
        return msgspec.structs.replace(
            finished, step=artifact.step, policy_versions=artifact.policy_versions, reason=reason
        )

    return _with_artifacts(worker, [updated(artifact) for artifact in worker.artifacts])


def _with_artifacts(worker: CaptureResult, artifacts: list[Artifact]) -> CaptureResult:
    """Return a worker with other fates of its artifacts, and the status that follows if they decided it."""
    status, reason = worker.status, worker.reason
    if (status, reason) == worst_fate(worker.artifacts):
        status, reason = worst_fate(artifacts)
    return msgspec.structs.replace(worker, artifacts=artifacts, status=status, reason=reason)
