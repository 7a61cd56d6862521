"""Keeps the record of this process on disk: its last reading, and its end.

A process that is killed writes nothing. So its last reading is there before, and the next process
that fails says who was dead by then. Nothing is installed: failures are seen as they leave a stage
or the loop, and an uncaught exception is read from ``sys`` at exit.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import select
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.files.device_clocks import Clocks
from verl_profiling.files.host_use import HostReader, MachineUse, ProcessUse, machine_use, oom_kills
from verl_profiling.files.opener import make_folder
from verl_profiling.files.process_record import RECORDS, End, Gone, ProcessRecord, read_records
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.step_summary import END, StepSummary
from verl_profiling.identity import ProcessId
from verl_profiling.watch.stage_memory import StageMemory

logger = logging.getLogger(__name__)

_AGAIN_NS = 10 * 10**9  # an unchanged record is written again, to show that the process lives
_CHANGED = 0.05  # change of the memory, as a share, from which a record is written at once
_SEEN_NS = 30 * 10**9  # without a reading for so long, training is over
_MOST = 0.5  # share of the time without a CPU from which a blocked event loop is its victim
_NEW_PEERS_MS = 2000  # between looks for processes that began to record
_LAST_MS = 300  # after a failure, for one whose connections have closed, and which ends now
_CASCADE_NS = 10**9  # of failures this close together, the first one is kept
_HARMLESS = (GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError, SystemExit)
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    __file__.rpartition("/watch/")[0],
)
_LONGEST_LINE = 300
_PID_OF_RAY = re.compile(r"\bpid[=:]\s?(\d+)")


class ProcessRecorder:
    """Writes the record of this process.

    Args:
        folder: The folder of all records.
        lane: Lane of the process.
        role: Its role.

    Attributes:
        folder: The folder of all records.
        open_step: Returns the open step of the loop, in the loop's process.
        memory: Reads the device of the process; ``None`` if it has used none.
    """

    def __init__(self, folder: Path, lane: str, role: str) -> None:
        self.folder = folder
        self.open_step: Callable[[], StepSummary | None] = lambda: None
        self.memory: StageMemory | None = None
        self._record = ProcessRecord(
            lane=lane, role=role, process=ProcessId.current(), oom_kills=oom_kills()
        )
        self._reader = HostReader(folder)
        self._written_ns = self._written_bytes = 0
        self._clocks: Clocks | None = None
        self._noted: tuple[int, str] = (0, "")
        self._lock = threading.Lock()
        self._peers: threading.Thread | None = None
        self._ends = -1  # an event's descriptor, which ends the thread

    def read(self, stages: Iterable[tuple[int, str]]) -> tuple[ProcessUse, MachineUse]:
        """Read memory and CPU, and write the record if it has changed.

        Args:
            stages: The open outermost stages: begin and name.
        """
        use, machine = self._reader.process(), machine_use()
        stage = next(iter(stages), (0, ""))[1]
        record, now_ns = self._record, clock.now_ns()
        step = self._step()
        size = use.own + use.shared + use.children
        if self.memory is not None and (device := self.memory.polled(stage)) is not None:
            record.device = device
            if device.kind == "cuda":
                self._clocks = self._clocks or Clocks()
                use = replace(use, clock=self._clocks.of(device.device))
            size += device.total_bytes - device.free_bytes
        is_new = (stage, step) != (record.stage, record.step)
        is_new |= abs(size - self._written_bytes) > _CHANGED * self._written_bytes
        record.machine, record.stage, record.step = machine, stage, step
        record.use, record.at_ns, record.oom_kills = use, now_ns, oom_kills()
        if is_new or now_ns - self._written_ns > _AGAIN_NS:
            self._written_bytes = size
            self._write()
        if self._peers is None and hasattr(os, "pidfd_open"):
            with suppress(OSError, RuntimeError):  # too many descriptors, or at exit
                self._ends = os.eventfd(0)
                self._peers = threading.Thread(
                    target=self._follow_peers, name="verl-profiling-peers", daemon=True
                )
                self._peers.start()
        return use, machine

    def end(self) -> None:
        """End the reading of clocks, and the thread that follows other processes, as training is
        over.
        """
        if self._clocks is not None:
            self._clocks.end()
        with self._lock:  # so that the thread does not close the descriptor before
            thread = self._peers
            if thread is None or not thread.is_alive():
                return
            os.eventfd_write(self._ends, 1)
        thread.join()

    def no_cpu(self) -> str:
        """Return a clause on why this process got no CPU for most of the time before the last
        reading; empty if it did, or if unknown.
        """
        use = self._record.use
        if (use.no_cpu or 0.0) <= _MOST:
            return ""
        return f" (it gets no CPU: {use.why or 'it is not known why'})"

    def failed(self, error: BaseException, stage: str, is_fatal: bool) -> None:
        """Write down an exception that leaves a stage or the loop, once."""
        now_ns = clock.now_ns()
        line = _last_line(error)
        chain = [*_chain(error)]
        before = self._record.end
        is_known = any((id(one), _last_line(one)) == self._noted for one in chain)
        if isinstance(error, _HARMLESS):
            return
        is_soon = before is not None and before.error and now_ns - before.at_ns < _CASCADE_NS
        if before is not None and (is_known or is_soon):
            if is_fatal > before.is_fatal:
                self._record.end = replace(before, is_fatal=True)
                self._write()
            return
        self._noted = id(error), line
        pid = _PID_OF_RAY.search(str(error)) if type(error).__module__.startswith("ray") else None
        errnos = [getattr(one, "errno", None) for one in chain]
        self._record.step = self._step()
        if self.memory is not None:  # what the frames of the traceback hold is not freed yet
            self._record.device = self.memory.read(stage, END)
        self._record.end = End(
            at_ns=now_ns,
            error=line,
            types=[type(one).__name__ for one in chain],
            errno=next((number for number in errnos if isinstance(number, int)), 0),
            stage=stage,
            is_fatal=is_fatal,
            code=_code(error),
            pid=int(pid[1]) if pid else 0,
        )
        self._write()

    def _step(self) -> int | None:
        step = self.open_step()
        return self._record.step if step is None else step.step

    def leave(self) -> None:
        """Write down the end of the process: the exception that nobody caught, if there is one."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error, "", is_fatal=True)
        end = self._record.end or End(at_ns=clock.now_ns())
        self._record.end = replace(end, has_left=True)
        if not self._written_ns or self.folder.is_dir():  # not where the run was removed
            self._write()

    def lost(self, lane: str, pid: int, at_ns: int) -> None:
        """Write down the end of a process, once, whose connection closed: it may have ended before
        it had a record.
        """
        if not any((gone.lane, gone.pid) == (lane, pid) for gone in self._record.gone):
            self._record.gone.append(Gone(at_ns, lane, pid, _signal_of(pid)))
            self._write()

    def _follow_peers(self) -> None:
        """Write down which watched processes of this machine die, until nobody reads any more."""
        poll = select.poll()
        poll.register(self._ends, select.POLLIN)
        is_first, is_over, is_last = True, False, False
        names: set[str] = {self._record.file}
        peers: dict[int, ProcessRecord] = {}
        while not is_last and clock.now_ns() - self._record.at_ns < _SEEN_NS:
            with suppress(OSError):
                for record in read_records(self.folder, socket.gethostname(), names):
                    names.add(record.file)
                    is_alive = record.process.alive()
                    if is_alive is False and record.end is None and not is_first:
                        self._dies(record)  # since the last look
                    if is_alive:
                        descriptor = os.pidfd_open(record.process.pid)
                        peers[descriptor] = record
                        poll.register(descriptor, select.POLLIN)
            is_first, is_last = False, is_over
            for descriptor, _ in poll.poll(_LAST_MS if is_last else _NEW_PEERS_MS):
                poll.unregister(descriptor)
                if descriptor == self._ends:
                    is_over = True
                    is_last = self._record.end is None
                    continue
                os.close(descriptor)
                self._dies(peers.pop(descriptor))
        with self._lock:
            self._peers = None
            for descriptor in (*peers, self._ends):
                os.close(descriptor)

    def _dies(self, peer: ProcessRecord) -> None:
        now_ns = clock.now_ns()
        kills = oom_kills()
        with suppress(OSError):
            for record in read_records(self.folder, peer.process.host):
                peer = record if record.file == peer.file else peer
        killed = max(0, kills - peer.oom_kills)
        pid = peer.process.pid
        self._record.gone.append(Gone(now_ns, peer.lane, pid, _signal_of(pid), killed))
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._written_ns = self._record.at_ns
            try:
                make_folder(self.folder)
                write_json_atomically(self.folder / self._record.file, self._record, durable=False)
            except OSError as error:
                logger.debug("the record of %s is not written: %s", self._record.lane, error)


_recorder: ProcessRecorder | None = None


def recorder_of(hangs: str, lane: str, role: str) -> ProcessRecorder | None:
    """Return the recorder of this process; a process has one.

    Args:
        hangs: Folder of the files of hangs, beside that of the records; empty for no recorder.
        lane: Lane of the process.
        role: Its role.
    """
    global _recorder
    if not hangs:
        return None
    folder = Path(hangs).with_name(RECORDS)
    if _recorder is None or _recorder.folder != folder:
        _recorder = ProcessRecorder(folder, lane, role)
        atexit.register(_recorder.leave)
        if multiprocessing.parent_process() is not None:  # such a process runs no atexit functions
            multiprocessing.util.Finalize(None, _recorder.leave, exitpriority=100)
    return _recorder


def end_recorder() -> None:
    """End the thread of this process's recorder; its record stays."""
    if _recorder is not None:
        _recorder.end()


def note_failure(error: BaseException, stage: str = "", is_fatal: bool = False) -> None:
    """Write down an exception that leaves a stage or, if ``is_fatal``, the loop."""
    if _recorder is not None:
        with suppress(Exception):  # the user has to see the error itself
            _recorder.failed(error, stage, is_fatal)


def note_death(lane: str, pid: int, at_ns: int) -> None:
    """Write down that a process of this machine has ended, if this process has a record."""
    if _recorder is not None:
        _recorder.lost(lane, pid, at_ns)


def _forget() -> None:
    global _recorder
    if _recorder is not None:
        atexit.unregister(_recorder.leave)
    _recorder = None


os.register_at_fork(after_in_child=_forget)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions from which it was raised; Ray's have the remote one
    inside.
    """
    seen: set[int] = set()
    one: object = error
    while isinstance(one, BaseException) and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = getattr(one, "cause", None) or one.__cause__ or one.__context__


def _last_line(error: BaseException) -> str:
    """Return the last line of an exception's traceback; of Ray's errors, that of the cause."""
    cause = getattr(error, "cause", None)
    error = cause if isinstance(cause, BaseException) else error
    text = "<exception str() failed>"  # as tracebacks say
    with suppress(Exception):
        text = str(error)
    return _writable(f"{type(error).__name__}: {text}".partition("\n")[0][:_LONGEST_LINE])


def _writable(text: str) -> str:
    """Return a text as valid UTF-8: half a surrogate pair, e.g. of a model's answer, is none."""
    return text.encode(errors="replace").decode()


def _code(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an exception."""
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            return _writable(f"{code.co_filename}:{line} in {code.co_name}")
    return ""


def _signal_of(pid: int) -> int:
    """Return the signal that killed a child of this process, which its owner still waits for."""
    with suppress(OSError, OverflowError):  # a file may name any number
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is not None and state.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return state.si_status
    return 0
