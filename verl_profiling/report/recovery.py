"""Completes the manifests of captures that were never written, from what is on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    ArtifactStatus,
    CaptureResult,
    Manifest,
    worst_fate,
)
from verl_profiling.named_files import check_lane
from verl_profiling.report.check import check_artifact
from verl_profiling.run_files import (
    RESULT_SUFFIX,
    read_manifest,
    read_result,
    read_starts,
    write_json_atomically,
)
from verl_profiling.timeline.inputs import (
    is_step,
    resolve_artifact,
    step_folders,
    step_number,
    the_run,
)
from verl_profiling.trajectory_log import LOG_SUFFIX

__all__ = ["Recovered", "recover"]

Outcome = Literal["recovered", "whole", "refused"]
_TOOLS = ("torch", "memory", "npu", "nsys", "precision", "trajectories")
_COLLECTED_LATER = "nsys"
_ENGINE_LANE = re.compile(r"(?P<name>rollout(?P<replica>\d+))_rank\d+")
_WORKER_LANE = re.compile(r"(?P<role>.+)_rank(?P<rank>\d+)")
_OF_COMMANDS = ("timeline", "report")  # one may be writing
_LOST = "its process ended before it was written"


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one step.

    Attributes:
        path: Its folder.
        outcome: ``recovered``: its manifest says now what is there. ``whole``: it said so before.
            ``refused``: the manifest was left as it is.
        reason: Why.
        artifacts: How many artifacts can be used, and how many were expected or found.
    """

    path: str
    outcome: Outcome
    reason: str = ""
    artifacts: tuple[int, int] = (0, 0)


def recover(path: Path, *, force: bool = False) -> list[Recovered]:
    """Complete the manifests of the steps under a path; may be repeated.

    Args:
        path: A run's folder, or one of its step folders.
        force: Do not ask whether the process that records, or compresses, is still alive.

    Raises:
        TraceFormatError: There is no step.
        OSError: A manifest cannot be written.
    """
    path = the_run(path.resolve())
    one = is_step(path) or (path.is_dir() and path in step_folders(path.parent))
    folders = [path] if one else step_folders(path) if path.is_dir() else []
    if not folders:
        raise TraceFormatError(path, "holds no step folders")
    return [_recover(folder, force) for folder in folders]


def _recover(folder: Path, force: bool) -> Recovered:
    known = (folder / MANIFEST_NAME).exists()
    try:
        manifest = read_manifest(folder) if known else _unknown(folder)
    except TraceFormatError as error:
        reason = f"{error.problem}; move {MANIFEST_NAME} away to have one written of what is there"
        return Recovered(path=str(folder), outcome="refused", reason=reason)
    pending = any(_is_pending(artifact) for worker in manifest.workers for artifact in worker.artifacts)
    if manifest.state == "written" and not pending and not any(folder.glob(f"*{RESULT_SUFFIX}")):
        return Recovered(path=str(folder), outcome="whole", artifacts=_counted(manifest))
    if not force and manifest.process is not None and manifest.process.alive():
        what = "is recording it" if manifest.state == "begun" else "may still be compressing"
        reason = f"{manifest.process} still runs, and {what}; --force does it nevertheless"
        return Recovered(path=str(folder), outcome="refused", reason=reason)
    _name_parts(folder)
    left = list(_results(folder))
    completed = _completed(folder, manifest, [result for _, result in left])
    if completed != manifest or not known:
        write_json_atomically(folder / MANIFEST_NAME, completed)
    for file, _ in left:
        file.unlink()
    return Recovered(path=str(folder), outcome="recovered", artifacts=_counted(completed))


def _name_parts(folder: Path) -> None:
    """Give what an ended process was writing its name, where that can be read; remove other parts."""
    for part in sorted(folder.glob(".*.part*")):
        name = part.name[1:].partition(".part")[0]
        taken = any((folder / known).exists() for known in (name, f"{name}.gz"))
        if name.endswith((".json", LOG_SUFFIX)) and part.is_file() and not part.is_symlink() and not taken:
            part.replace(folder / name)
        elif not part.is_dir() and not name.startswith(_OF_COMMANDS):
            part.unlink()


def _completed(folder: Path, manifest: Manifest, left: list[CaptureResult]) -> Manifest:
    """Return the manifest with the true fate of everything expected, and with what nobody expected."""
    workers = {worker.name: worker for worker in manifest.workers}
    for result in left:
        workers[result.name] = _with_promised(result, workers.get(result.name))
    for artifact in _found(folder, manifest, list(workers.values())):
        identity = _identity_of(artifact.lane, list(workers.values()))
        worker = workers.setdefault(
            identity.name,
            CaptureResult(
                identity=identity, roles=[identity.role], capture_id=manifest.capture_id, step=manifest.step
            ),
        )
        found = [*worker.artifacts, artifact]
        workers[identity.name] = msgspec.structs.replace(
            worker, artifacts=found, mode="discrete" if artifact.stage else worker.mode
        )
    verified = [_verified(folder, worker) for worker in workers.values()]
    if manifest.state == "written":
        return msgspec.structs.replace(manifest, workers=verified)
    ends = [manifest.begin_ns, *(end for worker in verified for end in _ends(manifest, folder, worker))]
    process = f" in {manifest.process}" if manifest.process is not None else ""
    note = f"the capture began{process}, and was never written; this is what was found in the folder"
    return msgspec.structs.replace(
        manifest,
        state="recovered",
        end_ns=max(ends),
        workers=verified,
        notes=list(dict.fromkeys([*manifest.notes, note])),
    )


def _verified(folder: Path, worker: CaptureResult) -> CaptureResult:
    artifacts = [_with_fate(folder, artifact) for artifact in worker.artifacts]
    status, reason = worst_fate(artifacts) if artifacts else (worker.status, worker.reason)
    return msgspec.structs.replace(worker, artifacts=artifacts, status=status, reason=reason)


def _with_fate(folder: Path, artifact: Artifact) -> Artifact:
    if artifact.status == "skipped" or (artifact.tool == _COLLECTED_LATER and artifact.status == "pending"):
        return artifact
    checked = check_artifact(folder, artifact)
    fates: dict[str, ArtifactStatus] = {
        "ok": "ok",
        "empty": "empty",
        "truncated": "truncated",
        "missing": "missing",
    }
    fate = fates.get(checked.fate, "failed")
    reason = checked.reason
    if fate == "missing":
        reason = artifact.reason if artifact.status in ("failed", "missing") and artifact.reason else _LOST
    return msgspec.structs.replace(
        artifact, status=fate, reason=reason, bytes=checked.bytes or None, events=checked.events
    )


def _with_promised(result: CaptureResult, expected: CaptureResult | None) -> CaptureResult:
    """Return what a worker left behind, with an entry for everything that it had promised."""
    artifacts = [msgspec.structs.replace(artifact, step=result.step) for artifact in result.artifacts]
    promised = expected.artifacts if expected is not None else []
    lost = [known for known in promised if not any(known.is_run_of(artifact) for artifact in artifacts)]
    return msgspec.structs.replace(result, artifacts=[*artifacts, *lost])


def _results(folder: Path) -> Iterator[tuple[Path, CaptureResult]]:
    for file in sorted(folder.glob(f"*{RESULT_SUFFIX}")):
        try:
            yield file, read_result(file)
        except TraceFormatError:
            continue


def _found(folder: Path, manifest: Manifest, workers: list[CaptureResult]) -> Iterator[Artifact]:
    """Yield the artifacts in a folder that no worker has an entry for."""
    tools = {*_TOOLS, *(tool for worker in workers for tool in worker.tools)}
    known = {artifact.path for worker in workers for artifact in worker.artifacts}
    for path in sorted(folder.iterdir()):
        if path.name in known or f"{path.name}.gz" in known:
            continue
        artifact = _named(path.name, tools)
        if artifact is not None:
            yield msgspec.structs.replace(artifact, step=manifest.step)


def _named(name: str, tools: set[str]) -> Artifact | None:
    """Return the artifact that a file name stands for: ``<lane>[.<stage>[.<number>]].<tool>...``."""
    parts = name.split(".")
    at = next(
        (index for index, part in enumerate(parts) if index and part.removesuffix("-rep") in tools), None
    )
    if at is None:
        return None
    try:
        check_lane(Path(name), parts[0])
    except TraceFormatError:
        return None
    stage = parts[1] if at > 1 else None
    occurrence = int(parts[2]) if at > 2 and parts[2].isdecimal() else 1
    tool = parts[at].removesuffix("-rep")
    return Artifact(
        path=name,
        lane=parts[0],
        tool="torch_memory" if tool == "memory" else tool,
        status="missing",
        stage=stage,
        occurrence=occurrence,
    )


def _identity_of(lane: str, workers: list[CaptureResult]) -> WorkerIdentity:
    """Return the worker that a lane belongs to, or one made of its name."""
    for worker in workers:
        if lane == worker.name or lane.startswith(f"{worker.name}_rank"):
            return worker.identity
    engine, worker_lane = _ENGINE_LANE.fullmatch(lane), _WORKER_LANE.match(lane)
    role = "rollout" if engine else worker_lane["role"] if worker_lane else lane
    return WorkerIdentity(
        role=role,
        rank=int(worker_lane["rank"]) if worker_lane and not engine else 0,
        replica=int(engine["replica"]) if engine else None,
        host="unknown",
        clock_domain="unknown",
        pid=0,
    )


def _ends(manifest: Manifest, folder: Path, worker: CaptureResult) -> Iterator[int]:
    """Yield when the worker is known to have recorded last, on the controller's clock."""
    offset_ns = manifest.offset_ns(worker.identity)
    for span in worker.stages:
        yield span.end_ns - offset_ns
    for artifact in worker.artifacts:
        if artifact.end_ns:
            yield artifact.end_ns - offset_ns
        elif artifact.status in ("ok", "truncated") and (path := resolve_artifact(folder, artifact)):
            yield path.stat().st_mtime_ns


def _unknown(folder: Path) -> Manifest:
    """Return the manifest of a capture of which nothing but its folder is known."""
    starts = read_starts(folder.parent)
    begin_ns = min((path.stat().st_mtime_ns for path in folder.iterdir()), default=folder.stat().st_mtime_ns)
    step = step_number(folder)
    return Manifest(
        run_id=starts[-1].run_id if starts else "",
        capture_id="",
        state="begun",
        step=step,
        start=max(1, len(starts)),
        steps=[step],
        begin_ns=begin_ns,
        end_ns=begin_ns,
        complete=False,
        controller=WorkerIdentity(role="controller", host="unknown", clock_domain="unknown", pid=0),
        process=starts[-1].process if starts else None,
    )


def _is_pending(artifact: Artifact) -> bool:
    return artifact.status == "pending" and artifact.tool != _COLLECTED_LATER


def _counted(manifest: Manifest) -> tuple[int, int]:
    artifacts = [artifact for worker in manifest.workers for artifact in worker.artifacts]
    expected = [artifact for artifact in artifacts if artifact.status != "skipped"]
    return sum(artifact.status in ("ok", "pending") for artifact in expected), len(expected)
