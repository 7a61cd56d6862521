"""Turns the files or folders that an engine wrote into verified artifacts of a step folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from isal import igzip

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.engines.base import EngineAdapter, EngineTrace, FolderTool, TraceTool
from verl_profiling.engines.spool import move
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, expected_artifact
from verl_profiling.tools.base import Output
from verl_profiling.tools.npu import output_of_recording
from verl_profiling.tools.trace_file import CUDA, EventCount, output_of_raw_trace, without_device

__all__ = ["expected_artifacts", "output_of"]


def expected_artifacts(
    request: CaptureRequest,
    identity: WorkerIdentity,
    engine: EngineAdapter,
    tool: TraceTool | FolderTool,
    ranks: Iterable[int],
) -> dict[EngineTrace, Artifact]:
    """Return the artifacts that a capture will have when all goes well.

    Args:
        request: The capture.
        identity: The replica.
        engine: Its engine.
        tool: What records it.
        ranks: The ranks inside the replica that are selected.
    """
    expected = {}
    for rank in ranks:
        for part in engine.stages:
            stage = "-".join(name for name in (request.stage, part) if name is not None) or None
            lane = identity.lane(rank)
            expected[EngineTrace(rank, part)] = expected_artifact(
                lane, tool.name, tool.suffix, stage, request.occurrence
            )
    return expected


def output_of(
    raw: Path, folder: Path, expected: Artifact, tool: TraceTool | FolderTool, device: str = "cpu"
) -> Output:
    """Move what an engine wrote into the step folder and return its artifact.

    Args:
        raw: A file of JSON, or of gzip-compressed JSON; or the folder of a recording of torch_npu.
        folder: The step folder.
        expected: The artifact as expected.
        tool: What recorded it.
        device: Kind of what the engine runs on.
    """
    final = folder / expected.path
    if isinstance(tool, FolderTool):
        final.mkdir()
        recorded = final / raw.name
        move(raw, recorded)
        return output_of_recording(recorded, expected, tool.options)
    activities = tool.options.activities
    if device != CUDA or (activities is not None and CUDA not in activities):
        device = ""
    if raw.suffix == ".gz":
        move(raw, final)
        pending = msgspec.structs.replace(expected, status="pending")
        return Output(pending, lambda: _verify(final, pending, device))
    part = final.with_name(f".{final.stem}.part")
    move(raw, part)
    return output_of_raw_trace(part, final, expected, tool.options.compression_level, device=device)


def _verify(path: Path, pending: Artifact, device: str) -> Artifact:
    """Read a compressed trace through, and say what it holds."""
    count = EventCount(device)
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
    return without_device(msgspec.structs.replace(artifact, status="ok"), count.lost_device)
