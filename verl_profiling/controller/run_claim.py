"""Claims a folder for a run.

The process that creates ``run.json`` owns the folder, so two runs never share a folder. There is no
lock that a crash could leave behind. A resumed run is another run: it records into ``run_2``.

If ``save_path`` is a URL, files are staged in a local folder.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import uuid
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.controller.worker_calls import settle
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import LocalFolder, make_private_folder
from verl_profiling.files.remote import RemoteFolder, Upload
from verl_profiling.files.run_files import json_of, write_json_atomically
from verl_profiling.identity import ProcessId, safe_name
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.units import local_time, visible

logger = logging.getLogger(__name__)

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors that last, such as missing permission. Others, as of a full disk or a lost connection, may
be over at the first capture.
"""

_SHARE_OF_TIMEOUT = 0.8  # of timeouts.start_s; without an answer, the rest is for another folder
_PACKAGES = ("verl-profiling", "torch", "ray", "verl", "torch-npu")
"""Distributions whose versions ``run.json`` has, besides those of rollout engines."""


class RunPlace(msgspec.Struct, frozen=True):
    """The folder of a run, and its upload target.

    Attributes:
        path: Path of the folder, the same on every host.
        run_id: Name of the run.
        token: Random id, unique even among runs of the same name; capture ids begin with it.
        url: The upload target of files, if ``path`` only stages them.
        retry_s: Seconds for which a failed upload is retried.
        clock_domain: Clock domain of the process that claimed the folder.
    """

    path: str
    run_id: str
    token: str
    url: str | None
    retry_s: float
    clock_domain: str

    def upload(self, name: str) -> Upload | None:
        """Return the upload target of a step folder; ``None`` if files stay on this host."""
        if self.url is None:
            return None
        return Upload(url=f"{self.url}/{name}", retry_s=self.retry_s)


def check_folder(config: ProfilingConfig) -> None:
    """Check that a local ``save_path`` can be made and written, and leave no file there.

    Ranks check at the same time. So each makes a folder of its own, in the deepest folder that
    exists, and removes it.

    Raises:
        ConfigError: The folder cannot be written for a lasting reason, or ``save_path`` is a URL
            whose staging folder cannot be used.
    """
    if config.is_remote:
        _check_staging(config.local_folder)
        return
    try:
        folder = config.local_folder
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        probe = existing / f".{uuid.uuid4().hex}"
        probe.mkdir(0o700)
        probe.rmdir()
    except OSError as error:
        problem = f"{config.save_path} cannot be written ({error.strerror})"
        if error.errno in _REFUSALS:
            raise ConfigError("save_path", f"{problem}; choose another folder") from error
        logger.warning(
            "save_path: %s; free its disk or choose another folder: until then nothing is captured",
            problem,
        )


def _check_staging(folder: Path) -> None:
    """Refuse a staging folder that exists but cannot be used: each captured step would fail."""
    if not os.path.lexists(folder):
        return
    try:
        make_private_folder(folder)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise ConfigError("remote.staging", f"{folder}: {error.strerror}") from error


def claim_folder(config: ProfilingConfig) -> tuple[RunPlace, RunInfo, bool]:
    """Claim ``save_path``, or ``save_path/run_2``, ``run_3`` and so on if another run owns the
    folder.

    Returns:
        The folder, the content of its ``run.json``, and whether an earlier run has the same name.

    Raises:
        OSError: The folder cannot be written.
    """
    from verl_profiling.engines import DISTRIBUTIONS  # not for a loop that claims no folder

    versions = {}
    for name in (*_PACKAGES, *DISTRIBUTIONS):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
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
        make_private_folder(config.local_folder)
        make_private_folder(path)
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
    return place, info, resumes


def _claim_remote(config: ProfilingConfig, info: RunInfo) -> tuple[str, bool]:
    """Claim a folder behind a URL, with retries; without an answer in time,
    use a random subfolder.
    """
    from tenacity import Retrying, stop_after_delay, wait_exponential

    claimed: Future[tuple[str, bool]] = Future()
    retry_s = _SHARE_OF_TIMEOUT * config.timeouts.start_s
    retrying = Retrying(
        stop=stop_after_delay(retry_s / 2), wait=wait_exponential(0.5, max=5), reraise=True
    )

    def claim() -> None:
        made = settle(Future(), partial(retrying, _claim, RemoteFolder(config.save_path), info))
        if claimed.set_running_or_notify_cancel():
            settle(claimed, made.result)
        elif made.exception() is None:  # too late: this run records elsewhere by now
            RemoteFolder(made.result()[0]).remove(RUN_NAME)

    threading.Thread(target=claim, name="remote-claim", daemon=True).start()
    try:
        return claimed.result(retry_s)
    except Exception as error:
        claimed.cancel()
        url = f"{config.save_path.rstrip('/')}/run_{uuid.uuid4().hex[:8]}"
        why = f"{type(error).__name__}: {str(error) or 'no answer'}"
        message = f"{config.save_path} cannot be claimed now ({why}); this run records into {url}"
        logger.warning("%s", visible(message))
        return url, False


def _claim(root: LocalFolder | RemoteFolder, info: RunInfo) -> tuple[str, bool]:
    """Claim the first free folder; return its path or URL,
    and whether an earlier run has this name.
    """
    owner = ""
    resumes = False
    data = json_of(info)
    number = 1
    while True:
        folder = root if number == 1 else root.child(f"run_{number}")
        whose, same = _owner(folder, info.run_id)
        resumes |= same
        # create() fails if another process was faster: that process owns the folder.
        if not whose and folder.create(RUN_NAME, data):
            if resumes:
                logger.info("run %s goes on in %s", info.run_id, visible(folder.url))
            elif owner:
                logger.warning(
                    "%s; this run is recorded in %s", visible(owner), visible(folder.url)
                )
            return folder.url, resumes
        owner = owner or whose
        number += 1


def _owner(folder: LocalFolder | RemoteFolder, run_id: str) -> tuple[str, bool]:
    """Return a sentence on the owner of a folder, or ``""``;
    and whether the owner's name is ``run_id``.
    """
    names = folder.names()
    if RUN_NAME not in names:
        for name in names:
            if name.startswith("step_"):
                return f"save_path {folder.url} holds step folders of a run without run.json", False
        return "", False
    try:
        info = msgspec.json.decode(folder.read(RUN_NAME), type=RunInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return (
            f"save_path {folder.url} belongs to a run with an unreadable run.json: {error}",
            False,
        )
    when = local_time(info.begin_ns)
    whose = f"save_path {folder.url} belongs to run {info.run_id}, started {when} by {info.process}"
    return whose, info.run_id == run_id
