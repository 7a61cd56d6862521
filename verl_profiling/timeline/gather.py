"""Fetches artifacts from the hosts that wrote them to file systems of their own, through Ray."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, Artifact
from verl_profiling.named_files import named_file
from verl_profiling.ray_cluster import connected
from verl_profiling.run_files import read_manifest
from verl_profiling.timeline.inputs import is_step, resolve_artifact, step_folders

__all__ = ["Elsewhere", "Nodes", "artifacts_elsewhere", "fetch"]

CHUNK_BYTES = 8 << 20
_AHEAD = 4
_ANSWER_S = 60.0


class Elsewhere(msgspec.Struct, frozen=True):
    """An artifact that is not in its step folder.

    Attributes:
        folder: The step folder.
        artifact: What its manifest says.
        host: Name of the host that has it.
        path: Its path there.
    """

    folder: Path
    artifact: Artifact
    host: str
    path: str

    @property
    def name(self) -> str:
        """Its path, relative to the run's folder."""
        return f"{self.folder.name}/{self.artifact.path}"


def artifacts_elsewhere(path: Path, torn: Callable[[Path, str], None]) -> list[Elsewhere]:
    """Return what the manifests of a run, or of a step folder, name as being on other hosts.

    Args:
        path: The folder.
        torn: Called with a manifest that cannot be read, and why.

    Raises:
        OSError: The folder cannot be read.
    """
    found: list[Elsewhere] = []
    for folder in [path] if is_step(path) else step_folders(path):
        try:
            found += _of_step(folder)
        except TraceFormatError as error:
            torn(folder / MANIFEST_NAME, error.problem)
    return found


def _of_step(folder: Path) -> Iterator[Elsewhere]:
    """Yield the artifacts of a step that are on other hosts.

    A manifest may come from anybody: a path that does not end as the artifact's own does is not followed.
    """
    if not (folder / MANIFEST_NAME).exists():
        return
    for worker in read_manifest(folder).workers:
        for artifact in worker.artifacts:
            host, _, there = artifact.where.partition(":")
            path = PurePosixPath(there)
            is_whole = path.is_absolute() and ".." not in path.parts
            is_its_own = there.endswith(f"/{folder.name}/{artifact.path}")
            if is_whole and is_its_own and resolve_artifact(folder, artifact) is None:
                yield Elsewhere(folder, artifact, host, there)


class Nodes:
    """The nodes of a Ray cluster, and their files.

    Args:
        address: Address of the cluster; ``auto`` for the one that this host is part of.

    Raises:
        ToolUnavailableError: There is no Ray, or no cluster.
    """

    def __init__(self, address: str = "auto") -> None:
        ray = connected("collect", address, "files of other hosts come")
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray: Any = ray
        self._pinned = NodeAffinitySchedulingStrategy

        # Defined here, so that nodes need not have this version of the package to run them.
        def look(paths: list[str]) -> list[tuple[str, int]]:
            from pathlib import Path

            for path in map(Path, paths):
                if path.is_dir():
                    files = sorted(file for file in path.rglob("*") if file.is_file())
                    return [(path.name, -1), *((str(f.relative_to(path)), f.stat().st_size) for f in files)]
                if path.is_file():
                    return [(path.name, path.stat().st_size)]
            return []

        def read(path: str, offset: int, count: int) -> bytes:
            with open(path, "rb") as file:  # noqa: PTH123 (runs anywhere)
                file.seek(offset)
                return file.read(count)

        self._look, self._read = ray.remote(num_cpus=0)(look), ray.remote(num_cpus=0)(read)

    def find(self, host: str, paths: list[str]) -> tuple[str, list[tuple[str, int]]]:
        """Return the node of a host that has one of some paths, and the file's name and size.

        Of a folder that is all files in it, after its name with -1. Nothing: no node has it.
        """
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        named = [node for node in alive if host in (node["NodeManagerHostname"], node["NodeManagerAddress"])]
        for node in named:
            found = self._get(self._look.options(**self._on(node["NodeID"])).remote(paths))
            if found:
                return node["NodeID"], found
        return "", []

    def chunks(self, node: str, path: str, size: int) -> Iterator[bytes]:
        """Yield a file's content."""
        offsets = iter(range(0, size, CHUNK_BYTES))
        waiting = []
        for offset in offsets:
            waiting.append(self._read.options(**self._on(node)).remote(path, offset, CHUNK_BYTES))
            if len(waiting) >= _AHEAD:
                yield self._get(waiting.pop(0))
        for reference in waiting:
            yield self._get(reference)

    def _on(self, node: str) -> dict[str, Any]:
        return {"scheduling_strategy": self._pinned(node, soft=False), "max_retries": 0}

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference, timeout=_ANSWER_S)
        except Exception as error:  # a node that dies, a file that goes away: Ray has errors of its own
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise OSError(lines[-1]) from error


def fetch(nodes: Nodes, wanted: Elsewhere) -> str:
    """Copy an artifact into its step folder, verified; return why it could not be, or nothing.

    Raises:
        OSError: The step folder cannot be written.
        TraceFormatError: The manifest names a file outside of it.
    """
    raw = wanted.path.removesuffix(".gz")
    node, files = nodes.find(wanted.host, list(dict.fromkeys([wanted.path, raw])))
    if not node:
        return f"no node of the cluster is called {wanted.host} and has {wanted.path}"
    (name, size), *inside = files
    final = named_file(wanted.folder, name)
    part = final.with_name(f".{name}.part")
    source = f"{wanted.path.rpartition('/')[0]}/{name}"
    try:
        if size < 0:
            for inner, inner_size in inside:
                _copy(nodes, node, f"{source}/{inner}", inner_size, named_file(part, inner))
        else:
            known = wanted.artifact.bytes
            if known not in (None, size) and name == wanted.artifact.path:
                return f"has {size} bytes at {wanted.host}:{wanted.path}, not {known} as when it was written"
            _copy(nodes, node, source, size, part)
        part.replace(final)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    return ""


def _copy(nodes: Nodes, node: str, source: str, size: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for chunk in nodes.chunks(node, source, size):
            file.write(chunk)
    if (arrived := target.stat().st_size) != size:
        raise OSError(f"{arrived} bytes of {source} arrived, not {size}")
