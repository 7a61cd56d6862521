"""Turns the files that an engine wrote into verified artifacts of a step folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
from isal import igzip

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.engines.base import SPOOL_PARENT, EngineAdapter, EngineTrace
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, expected_artifact
from verl_profiling.tools.base import Output
from verl_profiling.tools.torch_profiler import TorchTool
from verl_profiling.tools.trace_file import EventCount, output_of_raw_trace

__all__ = ["Spool", "expected_artifacts", "output_of"]


def expected_artifacts(
    request: CaptureRequest, identity: WorkerIdentity, engine: EngineAdapter, ranks: Iterable[int]
) -> dict[EngineTrace, Artifact]:
    """Return the artifacts that a capture will have when all goes well.

    Args:
        request: The capture.
        identity: The replica.
        engine: Its engine.
        ranks: The ranks inside the replica that are selected.
    """
    expected = {}
    for rank in ranks:
        for part in engine.stages:
            stage = "-".join(name for name in (request.stage, part) if name is not None) or None
            lane = identity.lane(rank)
            expected[EngineTrace(rank, part)] = expected_artifact(
                lane, TorchTool.name, TorchTool.suffix, stage, request.occurrence
            )
    return expected


class Spool:
    """The folder that an engine writes into; it shows what appeared since one capture started.

    Args:
        engine: The engine.
        label: The capture's label.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, engine: EngineAdapter, label: str) -> None:
        self._engine = engine
        self._label = label
        engine.spool.mkdir(parents=True, exist_ok=True)
        self._before = set(engine.spool.iterdir())

    def take(self) -> dict[EngineTrace, Path]:
        """Return what the engine wrote since then; of several files of a kind, the newest."""
        new = [path for path in _files_in(self._engine.spool) if path not in self._before]
        found: dict[EngineTrace, Path] = {}
        for path in sorted(new, key=lambda path: path.stat().st_mtime_ns):
            trace = self._engine.identify(path, self._label)
            if trace is not None:
                found[trace] = path
        return found

    def keep_extras(self, folder: Path, name: str) -> list[str]:
        """Move requested files other than ranks' traces to the step folder; return notes on them."""
        notes = []
        for path in _files_in(self._engine.spool):
            if suffix := self._engine.extra_suffix(path):
                kept = folder / f"{name}{suffix}"
                _move(path, kept)
                notes.append(f"{name}: {kept.name} was written by {self._engine.name} on request")
        return notes

    def clear(self) -> None:
        """Remove the other files: tables, traces of ranks that are not selected."""
        if self._engine.spool.parent.name == SPOOL_PARENT:
            shutil.rmtree(self._engine.spool, ignore_errors=True)
            try:
                self._engine.spool.parent.rmdir()
            except OSError:
                pass  # it contains the spool of another engine


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def output_of(raw: Path, folder: Path, expected: Artifact, level: int) -> Output:
    """Move an engine's file into the step folder and return its artifact.

    Args:
        raw: The file: JSON, or gzip-compressed JSON.
        folder: The step folder.
        expected: The artifact as expected.
        level: isal compression level for JSON.
    """
    final = folder / expected.path
    if raw.suffix == ".gz":
        _move(raw, final)
        pending = msgspec.structs.replace(expected, status="pending")
        return Output(pending, lambda: _verify(final, pending))
    part = final.with_name(f".{final.stem}.part")
    _move(raw, part)
    return output_of_raw_trace(part, final, expected, level)


def _move(source: Path, target: Path) -> None:
    try:
        source.replace(target)
    except OSError:  # on another file system
        shutil.move(source, target)


def _verify(path: Path, pending: Artifact) -> Artifact:
    """Read a compressed trace through, and say what it holds."""
    count = EventCount()
    whole = False
    try:
        with igzip.open(path, "rb") as file:
            for _ in count.read(file):
                pass
        whole = count.whole
    except (OSError, EOFError):
        pass  # cut off inside of the compression
    size = path.stat().st_size
    artifact = msgspec.structs.replace(pending, bytes=size, events=count.events)
    if not whole:
        reason = f"cut off after {size} bytes: the engine did not write it to the end"
        return msgspec.structs.replace(artifact, status="truncated", reason=reason)
    if not count.spans:
        return msgspec.structs.replace(artifact, status="empty", reason="the trace holds no spans")
    return msgspec.structs.replace(artifact, status="ok")
