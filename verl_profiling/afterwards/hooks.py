"""Runs the hooks of ``after``: a command or a function once a capture is written, beside the training.

Nothing that a hook does reaches the loop: it runs on a thread, its output goes to a file and into the
log, and its time is bounded.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

import msgspec

from verl_profiling.afterwards.background import BackgroundWork
from verl_profiling.afterwards.uploads import Upload, remove_uploaded
from verl_profiling.identity import WorkerIdentity, safe_name
from verl_profiling.remote import RemoteFolder, is_url
from verl_profiling.settings.after import AfterHook
from verl_profiling.visible import visible

__all__ = ["FinishHooks", "HookEvent"]

logger = logging.getLogger(__name__)

LOGS = "after"
_LOOK_AGAIN_S = 0.25
_GRACE_S = 5.0
_SHOWN_BYTES = 4096


class _Request(Protocol):
    """What a hook needs to know of a ``CaptureRequest``."""

    @property
    def capture_id(self) -> str: ...

    @property
    def folder(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def stage(self) -> str | None: ...

    @property
    def keep(self) -> bool: ...

    @property
    def last(self) -> bool: ...

    @property
    def upload(self) -> Upload | None: ...


class HookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, as a hook is told.

    Attributes:
        folder: The step folder, or the run's folder for ``when: last``; its URL, where ``save_path`` is one.
        run: The run's folder, or its URL.
        step: First step of the capture.
        role: Role of the process that runs the hook.
        rank: Its rank.
        pid: Its process id.
    """

    folder: str
    run: str
    step: int
    role: str
    rank: int
    pid: int


class FinishHooks:
    """The hooks of one process.

    Args:
        hooks: The settings, by name.
    """

    def __init__(self, hooks: Mapping[str, AfterHook]) -> None:
        self._hooks = dict(hooks)
        self._background = BackgroundWork("after")
        self._waiting: dict[str, dict[str, tuple[HookEvent, Path]]] = {}
        self._owed: dict[str, tuple[HookEvent, Path]] = {}
        self._run_already: set[str] = set()

    def begun(self, request: _Request, who: WorkerIdentity, *, recorded: bool = True) -> None:
        """Note that a capture began.

        Args:
            request: The capture; a warm-up has no hooks.
            who: The process, in one of its roles.
            recorded: Whether it records.
        """
        if not request.keep:
            return
        path, capture_id = Path(request.folder), request.capture_id
        written = str(path) if request.upload is None else request.upload.url
        run = written.rpartition("/")[0]
        for name, hook in self._hooks.items():
            if not hook.runs_on(who.role, who.rank, recorded):
                continue
            event = HookEvent(
                folder=written if hook.when == "capture" else run,
                run=run,
                step=request.step,
                role=who.role,
                rank=who.rank,
                pid=os.getpid(),
            )
            log = path.parent / LOGS / f"{path.name}.{safe_name(name)}.{who.name}.log"
            if hook.when == "last":
                if name in self._run_already:
                    continue
                self._owed[name] = (event, log)
                if not request.last or request.stage is not None:  # a step may have several windows
                    continue
            self._waiting = {capture_id: self._waiting.get(capture_id, {})}  # there is one at a time
            self._waiting[capture_id].setdefault(name, (event, log))

    def ended(self, capture_id: str, is_written: Callable[[], bool]) -> None:
        """Run the hooks of a capture that ended, as soon as ``is_written`` says so."""
        for name, (event, log) in self._waiting.pop(capture_id, {}).items():
            self._submit(name, event, log, is_written)

    def train_ends(self) -> None:
        """Run the hooks that are due once and have not run."""
        for name, (event, log) in list(self._owed.items()):
            self._submit(name, event, log, lambda: True)

    def drain(self, timeout_s: float) -> bool:
        """Wait for the hooks that run or are due; return whether all ended in time."""
        return self._background.drain(timeout_s)

    @property
    def longest_s(self) -> float:
        """How long all hooks together may take."""
        return sum(hook.timeout_s + _GRACE_S for hook in self._hooks.values())

    def _submit(self, name: str, event: HookEvent, log: Path, is_written: Callable[[], bool]) -> None:
        if self._hooks[name].when == "last":
            self._owed.pop(name, None)
            if name in self._run_already:
                return
            self._run_already.add(name)

        def work() -> float | None:
            if not is_written():
                return _LOOK_AGAIN_S
            _run(name, self._hooks[name], event, log)
            return None

        self._background.submit(work)


def _run(name: str, hook: AfterHook, event: HookEvent, log: Path) -> None:
    """Run a hook and say how it went."""
    who = f"after.{name} ({event.role} rank {event.rank}, step {event.step})"
    begin = time.monotonic()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        begin_byte = log.stat().st_size if log.exists() else 0
        outcome = _run_command(hook, event, log) if hook.command else _call(hook, event, log)
        with log.open("rb") as file:
            file.seek(max(begin_byte, log.stat().st_size - _SHOWN_BYTES))
            printed = file.read(_SHOWN_BYTES).decode(errors="replace").rstrip()
    except OSError as error:
        outcome, printed = f"could not be run: {error}", ""
    lines = "".join(f"\n  {visible(line)}" for line in printed.splitlines())
    logger.log(
        logging.WARNING if outcome else logging.INFO,
        "%s %s after %.1f s; output in %s%s",
        *(who, outcome or "succeeded", time.monotonic() - begin, log, lines),
    )
    if is_url(event.run) and log.exists():
        try:
            RemoteFolder(event.run).put(log, f"{LOGS}/{log.name}")
        except Exception as error:  # each file system raises errors of its own
            logger.warning("%s was not uploaded: %s: %s", log, type(error).__name__, error)
        else:
            remove_uploaded(log)


def _run_command(hook: AfterHook, event: HookEvent, log: Path) -> str:
    """Run a command; return what went wrong, or nothing."""
    values = msgspec.to_builtins(event)
    more = {name: text.format(**values) for name, text in hook.environment.items()}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [text.format(**values) for text in hook.command or ()],
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(hook.timeout_s)
    except subprocess.TimeoutExpired:
        _end_group(process)
        return f"was ended: it took longer than timeout_s={hook.timeout_s:g}"
    return f"exited with {code}" if code else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and all it started: first asked, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(_GRACE_S if number == signal.SIGTERM else None)
        except subprocess.TimeoutExpired:
            continue


def _call(hook: AfterHook, event: HookEvent, log: Path) -> str:
    """Call a function on a thread; return what went wrong, or nothing."""
    problem: list[str] = []

    def call() -> None:
        try:
            module, _, function = (hook.callable or "").partition(":")
            getattr(import_module(module), function)(event)
        except BaseException as error:
            problem.append(f"raised {type(error).__name__}: {error}")
            with log.open("a") as output:
                output.write(traceback.format_exc())

    log.touch()
    thread = threading.Thread(target=call, name="after-hook", daemon=True)
    thread.start()
    thread.join(hook.timeout_s)
    if thread.is_alive():
        return f"is not waited for any longer: timeout_s={hook.timeout_s:g} is over, and it still runs"
    return problem[0] if problem else ""
