"""Which artifacts cannot be seen from the controller: their hosts have file systems of their own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl_profiling.manifest import Artifact, Manifest

__all__ = ["located"]

_NOT_SEEN = "cannot be seen from the controller; `verl-profiling collect` fetches them"


def located(folder: Path, manifest: Manifest, *, remote: bool = False, ended: bool = False) -> Manifest:
    """Return a manifest that says where the artifacts are that are not in the step folder.

    Args:
        folder: The step folder.
        manifest: Its manifest.
        remote: The folder only stages files for a URL: those that are done are not here.
        ended: The run ends, so that what is pending stays where it is.
    """
    try:
        seen = {path.name for path in folder.iterdir()} if not remote else set()
    except OSError:
        return manifest
    hosts: dict[str, None] = {}
    workers = []
    for worker in manifest.workers:
        host = worker.identity.host

        def placed(artifact: Artifact, host: str = host) -> Artifact:
            is_done = artifact.status in ("ok", "truncated") and not remote
            is_left = artifact.status == "pending" and ended and (remote or host != manifest.controller.host)
            if artifact.where or not (is_done or is_left):
                return artifact
            if seen & {artifact.path, artifact.path.removesuffix(".gz")} or host == "unknown":
                return artifact
            hosts[host] = None
            return msgspec.structs.replace(artifact, where=f"{host}:{folder / artifact.path}")

        artifacts = [placed(artifact) for artifact in worker.artifacts]
        workers.append(msgspec.structs.replace(worker, artifacts=artifacts))
    if not hosts:
        return manifest
    notes = list(manifest.notes)
    if not remote:
        notes.append(f"files of {', '.join(hosts)} {_NOT_SEEN}")
    return msgspec.structs.replace(manifest, workers=workers, notes=list(dict.fromkeys(notes)))
