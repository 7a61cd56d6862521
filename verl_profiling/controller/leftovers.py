"""What a worker's process left in the step folder when it ended: nobody else can finish its files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from verl_profiling.manifest import Artifact, expected_artifact
from verl_profiling.tools.base import Tool
from verl_profiling.tools.trace_file import output_of_raw_trace

__all__ = ["take_up"]

_TRACE = ".json.gz"


def take_up(folder: Path, lane: str, tools: Iterable[Tool], promised: Sequence[Artifact]) -> list[Artifact]:
    """Return what there is of each artifact, and finish its files: a trace that was cut off is kept as such.

    Args:
        folder: The step folder.
        lane: The worker's lane.
        tools: Its tools.
        promised: What it said that it would write; stages that it recorded are found by their names.
    """
    known = {artifact.path: artifact for artifact in promised}
    try:
        for file in sorted(folder.iterdir()):
            for artifact in _named(file.name, lane, tools):
                known.setdefault(artifact.path, artifact)
        return [_taken_up(folder, artifact) for artifact in known.values()]
    except OSError:  # the folder is on another host, or gone
        return list(promised)


def _named(name: str, lane: str, tools: Iterable[Tool]) -> Iterable[Artifact]:
    """Yield the artifact that a file belongs to, under whatever name it was being written."""
    plain = name.removeprefix(".").removesuffix(".tmp").removesuffix(".part")
    for tool in tools:
        for final in (plain, f"{plain}.gz"):
            if tool.suffix and final.startswith(f"{lane}.") and final.endswith(tool.suffix):
                stage, _, number = final[len(lane) + 1 : -len(tool.suffix)].partition(".")
                occurrence = int(number) if number.isdigit() else 1
                yield msgspec.structs.replace(
                    expected_artifact(lane, tool.name, tool.suffix, stage or None, occurrence), path=final
                )


def _taken_up(folder: Path, promised: Artifact) -> Artifact:
    final = folder / promised.path
    raw = final.with_suffix("")
    writing = [final.with_name(f".{path.name}.part") for path in (final, raw)]
    try:
        if final.exists():
            if final.name.endswith(_TRACE):
                raw.unlink(missing_ok=True)
            size = final.stat().st_size if final.is_file() else None
            return msgspec.structs.replace(promised, status="ok", bytes=size)
        if final.name.endswith(_TRACE):
            found = output_of_raw_trace(raw if raw.exists() else writing[1], final, promised, 0).artifact
            if found.status == "pending":
                return msgspec.structs.replace(found, path=raw.name, status="ok", bytes=raw.stat().st_size)
            if found.status == "truncated":
                return msgspec.structs.replace(found, reason=f"cut off after {found.bytes} bytes")
        return promised
    finally:
        for part in writing:
            part.unlink(missing_ok=True)
