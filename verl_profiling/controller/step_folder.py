"""Makes step folders, and writes the loop's part of them: ``manifest.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.controller.run import Run, claim_run
from verl_profiling.identity import ProcessId, step_folder_name
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    Manifest,
    StageSpan,
    finite_numbers,
)
from verl_profiling.remote import RemoteFolder, Upload
from verl_profiling.run_files import RESULT_SUFFIX, read_manifest, write_json_atomically
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["StepFolders", "is_pending"]


class StepFolders:
    """The step folders of a run, whose folder is claimed when first needed.

    All methods raise ``OSError`` when it cannot be written.

    Args:
        config: The settings; ``save_path`` is the run's folder unless another run has it.

    Attributes:
        claimed: The run, once its folder is claimed, or another rank has said which it is.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self._config = config
        self.claimed: Run | None = None
        self._recordings: Counter[int] = Counter()
        self._last: tuple[Path, Manifest] | None = None
        self._changed = False
        self._not_captured: dict[int, str] = {}

    @property
    def run(self) -> Run:
        """The run."""
        if self.claimed is None:
            self.claimed = claim_run(self._config)
            if self._not_captured:
                self.claimed.amend(not_captured=self._not_captured)
        return self.claimed

    def not_captured(self, step: int, why: str) -> None:
        """Put a step on record whose capture could not begin, as soon as that can be written."""
        self._not_captured[step] = why
        if self.claimed is not None:
            self.claimed.amend(not_captured=self._not_captured)

    def name(self, step: int, keep: bool = True) -> str:
        """Return the name of the folder of a step that is captured now; every rank counts alike."""
        self._recordings[step] += keep
        return step_folder_name(step, self._recordings[step])

    def make(self, name: str, shared: bool) -> Path:
        """Make a step folder.

        Args:
            name: Its name.
            shared: Other ranks may have made it.
        """
        folder = self.run.path / name
        folder.mkdir(parents=True, exist_ok=shared)
        return folder

    def begin(self, folder: Path, manifest: Manifest) -> None:
        """Write what is expected of a capture that begins."""
        self.flush()
        self._write(folder, msgspec.structs.replace(manifest, state="begun"))

    def write(self, folder: Path, manifest: Manifest) -> None:
        """Write what became of it, and where the files are that are not seen from here."""
        self._write(folder, manifest if self.run.url is not None else _located(folder, manifest))

    def wrote_last(self, step: int) -> bool:
        """Return whether the capture that was written last is of that step."""
        return self._last is not None and step in self._last[1].steps

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add numbers of a step to the manifest that was written last; :meth:`flush` writes them."""
        if self._last is None:
            return
        numbers, notes = finite_numbers(metrics)
        manifest = self._last[1]
        spans = [
            msgspec.structs.replace(span, metrics={**span.metrics, **numbers}) if span.step == step else span
            for span in manifest.step_spans
        ]
        self._amend(
            step_spans=spans, metrics={**manifest.metrics, **numbers}, notes=[*manifest.notes, *notes]
        )

    def add_stages_after(self, spans: list[StageSpan], notes: list[str]) -> None:
        """Add the loop's stages after the captured step; :meth:`flush` writes them."""
        if self._last is not None:
            self._amend(outside=spans, notes=[*self._last[1].notes, *notes])

    def flush(self) -> None:
        """Write what was added since the last manifest was written."""
        if self._last is not None and self._changed:
            self._changed = False
            if self._last[0].is_dir():
                self._write(*self._last)

    def _amend(self, **fields: Any) -> None:
        if self._last is not None:
            folder, manifest = self._last
            self._last, self._changed = (folder, msgspec.structs.replace(manifest, **fields)), True

    def _write(self, folder: Path, manifest: Manifest) -> None:
        manifest = msgspec.structs.replace(manifest, process=ProcessId.current())
        write_json_atomically(folder / MANIFEST_NAME, manifest)
        self._last = (folder, manifest)
        if manifest.state == "written":
            self.run.publish(folder)


def _located(folder: Path, manifest: Manifest) -> Manifest:
    """Return a manifest with the place of each artifact that a host has on a disk of its own."""
    names = {path.name for path in folder.iterdir()}
    hosts: dict[str, None] = {}

    def placed(worker: CaptureResult, artifact: Artifact) -> Artifact:
        seen = {artifact.path, artifact.path.removesuffix(".gz")} & names
        if seen or artifact.where or artifact.reason or artifact.status not in ("ok", "pending", "truncated"):
            return artifact
        hosts[worker.identity.host] = None
        where = f"{worker.identity.host}:{worker.folder}/{artifact.path}"
        return msgspec.structs.replace(artifact, where=where)

    workers = [
        msgspec.structs.replace(worker, artifacts=[placed(worker, one) for one in worker.artifacts])
        for worker in manifest.workers
    ]
    said = f"files of {', '.join(hosts)} are not seen from here: copy them into this folder"
    return msgspec.structs.replace(
        manifest, workers=workers, notes=[*manifest.notes, said] if hosts else manifest.notes
    )


def is_pending(folder: Path, upload: Upload | None = None) -> bool:
    """Return whether a process may still write into a step folder.

    Args:
        folder: The folder.
        upload: Where its files go, if it only stages them: a process puts its result there last.
    """
    pending = {
        f"{worker.name}{RESULT_SUFFIX}"
        for worker in read_manifest(folder).workers
        if any(artifact.status == "pending" for artifact in worker.artifacts)
    }
    if upload is None:
        return bool(pending)
    return not {MANIFEST_NAME, *pending} <= RemoteFolder(upload.url).names()
