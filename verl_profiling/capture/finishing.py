"""Background work after a capture, while training goes on: compression, uploads and ``after``
hooks.

An ``after`` hook is a command from the settings ``after``. It cannot disturb training: it has a
thread, a timeout, and a file for its output.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.files.opener import appended, make_folder
from verl_profiling.files.remote import Upload, copy_line
from verl_profiling.identity import WorkerIdentity, safe_name
from verl_profiling.manifest import Artifact
from verl_profiling.settings.config import AfterHook
from verl_profiling.tools import Output
from verl_profiling.units import visible

logger = logging.getLogger(__name__)

_LOGS = "after"  # the folder of the hooks' output, in the run's folder
_LOOK_AGAIN_S = 0.25  # each look reads the manifest
_GRACE_S = 5.0  # from SIGTERM to SIGKILL, for a command that handles SIGTERM


@dataclass(eq=False)
class BackgroundWork:
    """Runs functions one after another, on a thread that exists while there is work.

    The interpreter does not wait for this thread at exit, unlike for executors of
    ``concurrent.futures``.

    Args:
        name: Kind of work, for the name of the thread.
    """

    name: str
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _work: deque[Callable[[], object]] = field(default_factory=deque)
    _running: bool = False

    def submit(self, work: Callable[[], object]) -> None:
        """Queue a function."""
        with self._changed:
            self._work.append(work)
            if self._running:
                return
            self._running = True
        thread = threading.Thread(target=self._run, name=f"verl-profiling-{self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at exit, Python 3.12 and later start no thread; drain() works then
            with self._changed:
                self._running = False

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; return whether that was in time."""
        if not self._running and self._work:
            self._run()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, max(0.0, timeout_s))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._running = False
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except Exception:
                logger.exception("%s: work in the background failed", self.name)


def finish(
    output: Output,
    background: BackgroundWork,
    request: CaptureStart,
    done: Callable[[Artifact], object],
    complete: Callable[[Artifact], Artifact] = lambda artifact: artifact,
) -> Artifact:
    """Queue the compression and upload of an artifact; return the artifact, ``pending`` if there is
    work.

    Args:
        output: Output of the tool.
        background: Thread for the work.
        request: The request of the capture, with its step folder and upload target.
        done: Called with the artifact's final status, if there is work.
        complete: Adds fields that the tool does not know, e.g. begin and end of the recording.
    """
    compress = output.finish
    upload = request.upload
    uploads = upload is not None and (compress or output.artifact.status in ("ok", "truncated"))
    artifact = complete(output.artifact)
    if not (compress or uploads):
        return artifact
    pending = artifact.with_status("pending")

    def work() -> None:
        try:
            final = complete(compress()) if compress is not None else artifact
            if upload is not None:
                final = _uploaded(Path(request.folder), upload, final)
        except Exception as error:
            logger.exception("compression of %s failed", pending.path)
            final = pending.with_status(
                "failed", f"compression failed: {type(error).__name__}: {error}"
            )
        done(final)

    background.submit(work)
    return pending


def _uploaded(folder: Path, upload: Upload, artifact: Artifact) -> Artifact:
    """Upload a finished artifact; return it, after a failure with its local path and the reason."""
    local = folder / artifact.path
    if not local.exists():  # empty or failed, or removed meanwhile
        return artifact
    try:
        upload.move(local, artifact.path)
    except Exception as error:  # each file system raises errors of its own
        reason = visible(f"not uploaded: {type(error).__name__}: {error}")
        logger.error(
            "%s was %s; the file stays in %s. To upload all files there: %s",
            artifact.path,
            reason,
            folder,
            copy_line(folder, upload.url),
        )
        reason = "; ".join(filter(None, (artifact.reason, reason)))
        return artifact.with_status(
            artifact.status, reason, where=f"{socket.gethostname()}:{local}"
        )
    return artifact


class AfterHooks:
    """The ``after`` hooks of one process.

    Args:
        hooks: The settings of the hooks, by name.

    Attributes:
        background: Runs the hooks.
    """

    def __init__(self, hooks: Mapping[str, AfterHook]) -> None:
        self._hooks = dict(hooks)
        self.background = BackgroundWork("after")
        self._capture_id = ""
        self._runs: dict[str, Callable[[], None]] = {}
        self._last: dict[str, Callable[[], None]] = {}

    def begun(self, request: CaptureStart, who: WorkerIdentity, *, recorded: bool = True) -> None:
        """Note that a capture has begun, and prepare the process's ``after`` hooks for its end.

        Args:
            request: The request of the capture; a warm-up has no hooks.
            who: The process, in one of its roles.
            recorded: Whether the process takes part in the capture.
        """
        if not request.keep:
            return
        if self._capture_id != request.capture_id:
            self._capture_id = request.capture_id
            self._runs = {}
        for name, hook in self._hooks.items():
            if not hook.runs_on(who.role, who.rank, recorded):
                continue
            run = partial(_run, name, hook, request, who)
            if hook.when == "last":
                self._last[name] = run
                if request.last and request.stage is None:  # a step may have several rollouts
                    self._runs[name] = run
            else:
                self._runs.setdefault(name, run)

    def ended(self, capture_id: str, is_written: Callable[[], bool]) -> None:
        """Run the hooks of an ended capture once ``is_written`` returns true,
        or their timeout is over.
        """
        if capture_id != self._capture_id:
            return
        runs, self._runs = self._runs, {}
        for name, run in runs.items():
            self._last.pop(name, None)
            self.background.submit(
                partial(_run_when, is_written, self._hooks[name].timeout_s, name, run)
            )

    def train_ends(self) -> None:
        """Run the hooks that run once per training (``when: last``), unless they have run."""
        runs, self._last = self._last, {}
        for run in runs.values():
            self.background.submit(run)

    @property
    def longest_s(self) -> float:
        """Upper limit (s) of the waits for files and the commands of all hooks."""
        return sum(2 * hook.timeout_s + _GRACE_S for hook in self._hooks.values())


def _run_when(
    is_written: Callable[[], bool], wait_s: float, name: str, run: Callable[[], None]
) -> None:
    until_s = time.monotonic() + wait_s
    while not is_written():
        if time.monotonic() >= until_s:
            logger.warning(
                "after.%s begins, and files are not written after timeout_s=%g", name, wait_s
            )
            break
        time.sleep(_LOOK_AGAIN_S)
    run()


def _run(name: str, hook: AfterHook, request: CaptureStart, who: WorkerIdentity) -> None:
    """Run a hook, and log its outcome."""
    path = Path(request.folder)
    written = request.folder if request.upload is None else request.upload.url
    run = written.rpartition("/")[0]
    values = {
        "FOLDER": written if hook.when == "capture" else run,
        "RUN": run,
        "STEP": request.step,
        "ROLE": who.role,
        "RANK": who.rank,
        "PID": os.getpid(),
    }
    log = path.parent / _LOGS / f"{path.name}.{safe_name(name)}.{who.name}.log"
    begin = time.monotonic()
    try:
        make_folder(log.parent)
        outcome = _outcome(hook, values, log)
    except OSError as error:
        outcome = f"could not be run: {error}"
    logger.log(
        logging.WARNING if outcome else logging.INFO,
        "after.%s (%s rank %d, step %d) %s after %.1f s; output in %s",
        name,
        who.role,
        who.rank,
        request.step,
        outcome or "succeeded",
        time.monotonic() - begin,
        log,
    )
    if request.upload is not None and log.exists():
        try:
            Upload(url=run, retry_s=request.upload.retry_s).move(log, f"{_LOGS}/{log.name}")
        except Exception as error:  # each file system raises errors of its own
            logger.warning("%s was not uploaded: %s: %s", log, type(error).__name__, error)


def _outcome(hook: AfterHook, values: Mapping[str, object], log: Path) -> str:
    """Run the command of a hook; return a description of its failure, or ``""`` after success.

    Args:
        hook: Settings of the hook.
        values: Values of environment variables, by name without ``VERL_PROFILING_``.
        log: File for the command's output.
    """
    environment = {f"VERL_PROFILING_{name}": str(value) for name, value in values.items()}
    with appended(log) as output:
        process = subprocess.Popen(
            hook.command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(hook.timeout_s)
    except subprocess.TimeoutExpired:
        _end_group(process)
        return f"was ended after timeout_s={hook.timeout_s:g}"
    return f"exited with {code}" if code else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and its child processes with SIGTERM, and after a grace time with SIGKILL."""
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
