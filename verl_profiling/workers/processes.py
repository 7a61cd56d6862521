"""Workers in processes without Ray, started by ``multiprocessing`` or ``subprocess``.

The loop's process listens at a socket of this host. A worker's process connects once (joins). A
thread in it then answers the callback's calls in order, until either process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import msgspec

from verl_profiling import clock
from verl_profiling.controller.worker_calls import (
    Call,
    Target,
    WorkerLostError,
    make_targets,
    wait_for,
)
from verl_profiling.errors import CaptureStateError
from verl_profiling.files.opener import UNDECODABLE, make_folder, opened, whole_file
from verl_profiling.files.run_files import json_of
from verl_profiling.identity import ROLLOUT_ROLE, ProcessId
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.typed_values import Positive, value_of
from verl_profiling.watch.process_sums import NO_LOOKS, WatchQuestion

logger = logging.getLogger(__name__)

_AT_ONCE = 128
"""Processes that may join at the same time: Linux lets no more wait by default before 5.4."""

CALLBACK = "callback.json"
"""The file in a run's folder by which engines find its callback."""

_OWN = 0o600
_OTHERS_WRITE = 0o022
_ANSWER_S = 5.0  # longest wait for the callback's answer, which holds up an engine's first request

_LOOK_S = 1.0  # a loop that is started again takes longer to its first step

_NO_LIMIT_S = 1e9
"""Timeout of a call here: it is the callback that waits with a timeout."""

ServerMaker = Callable[[dict[str, Any] | None, int], Any]
"""Makes the worker of an engine, from a callback's settings and the index of the replica."""

_connections: WeakSet[Connection | Listener] = WeakSet()


def _close_inherited() -> None:
    """Close the sockets that a forked child inherits: open, they would hide the parent's end."""
    for connection in [*_connections]:
        connection.close()


os.register_at_fork(after_in_child=_close_inherited)


def _start(function: Callable[..., None], *arguments: object) -> None:
    """Start a thread that does not hold up the end of its process."""
    name = "verl-profiling-processes"
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


class WorkerProcesses:
    """The worker processes of a role, to be passed to ``add_workers`` or ``add_rollout``.

    Args:
        size: Number of processes.

    Raises:
        ConfigError: The size is no positive whole number.

    Attributes:
        world_size: Number of processes.
        address: Path of the socket; the processes pass it to :func:`join_callback`.
    """

    _absent = "has not joined: call join_callback(worker, address, rank=...) in it"

    def __init__(self, size: int) -> None:
        self.world_size: int = value_of(Positive, size, "WorkerProcesses")
        self._members: list[_Member | None] = [None] * self.world_size
        self._lock = threading.Lock()
        self._settings: dict[str, Any] | None = None
        self._listener = Listener(family="AF_UNIX", backlog=_AT_ONCE)
        _connections.add(self._listener)
        self._closed = False
        self.address = str(self._listener.address)
        _start(self._listen)

    def execute_all_async(self, method: str, *arguments: Any) -> list[Future[Any]]:
        """Call a method of the worker in every process; the callback calls this method."""
        futures = []
        for member in self._members:
            future: Future[Any] = Future()
            if member is None:
                future.set_exception(WorkerLostError(self._absent))
            else:
                member.call(future, method, arguments)
            futures.append(future)
        return futures

    def close(self) -> None:
        """Accept no further processes; processes that have joined stay."""
        self._closed = True
        with suppress(OSError):  # closed already
            Client(self.address).close()  # wakes the thread that waits for a connection

    def _listen(self) -> None:
        while True:
            connection = self._listener.accept()
            if self._closed:
                self._listener.close()
                return
            _start(self._admit, connection)

    def _admit(self, connection: Connection) -> None:
        """Let a process join, or send it the reason why it cannot; then read its replies."""
        _connections.add(connection)
        try:
            rank, pid = connection.recv()
        except (EOFError, OSError):  # it has ended meanwhile
            return
        member = _Member(connection, pid)
        rank, refusal = self._take(rank, member)
        with suppress(OSError):  # it has ended or waits no longer, which read() notices
            connection.send((refusal, rank, self._settings))
        if refusal:
            logger.warning("a process (pid %d) is not captured: %s", pid, refusal)
        else:
            _start(member.send)
            member.read()

    def _take(self, rank: int | None, member: _Member) -> tuple[int, str]:
        """Register a process under a rank; ``None`` for the first free rank.

        Returns:
            The rank, and the reason of a refusal; empty if the process is registered.
        """
        with self._lock:
            if rank is None:
                rank = self._first_free()
            if not 0 <= rank < self.world_size:
                return (
                    rank,
                    f"rank {rank} is none of {self.world_size} processes, which count from 0",
                )
            earlier = self._members[rank]
            if earlier is not None and not earlier.ended:
                return (
                    rank,
                    f"rank {rank} has joined already (pid {earlier.pid}); pass another rank",
                )
            self._members[rank] = member
            return rank, ""

    def _first_free(self) -> int:
        for rank, member in enumerate(self._members):
            if member is None or member.ended:
                return rank
        return self.world_size


class EngineProcesses(WorkerProcesses):
    """Engines in processes that the user's code does not prepare, for ``add_rollout``.

    In such a process, ``VERL_PROFILING_RUN`` switches on the plugin for vLLM and SGLang. An engine
    of this host then joins at its next step, as the first replica that is free.

    Args:
        config: The same settings as the callback's.
        replicas: Number of engines.

    Raises:
        ConfigError: The settings are wrong, or ``replicas`` is no positive whole number.
        OSError: The run's folder cannot be written.
    """

    _absent = "has not joined: an engine with VERL_PROFILING_RUN set does so at a request"

    def __init__(
        self, config: ProfilingConfig | Mapping[str, Any] | None, replicas: int = 1
    ) -> None:
        settings = ProfilingConfig.from_any(config)
        super().__init__(replicas)
        self._settings = settings.to_dict()
        if settings.enable:
            place = CallbackPlace(address=self.address, process=ProcessId.current())
            make_folder(settings.local_folder)
            with whole_file(settings.local_folder / CALLBACK) as file:
                os.fchmod(file.fileno(), _OWN)  # also where a group writes the folder
                file.write(json_of(place))


class CallbackPlace(msgspec.Struct, kw_only=True):
    """The content of the file by which engines find the callback of their run.

    Attributes:
        address: Path of the callback's socket.
        process: The process of the callback, to see whether it still lives.
    """

    address: str
    process: ProcessId


def join_run(folder: Path, set_up: ServerMaker, loop: asyncio.AbstractEventLoop | None) -> bool:
    """Let the callback of a run record an engine of this process, and after it each later one,
    e.g. of a loop that is started again.

    Args:
        folder: The run's folder.
        set_up: Makes the worker that a callback calls, from the callback's settings and the index
            of the replica.
        loop: Event loop on which the worker's coroutines run.

    Returns:
        Whether the run has a callback on this host, which still lives.

    Raises:
        ProfilingError: The callback refuses the engine, or cannot record it.
    """
    address = _callback_in(folder)
    if address:
        member = _RunMember(folder, set_up, loop)
        _start(member.answer, *member.join(address))
    return bool(address)


@dataclass
class _RunMember:
    """An engine of this process that the callbacks of a run record one after another."""

    folder: Path
    set_up: ServerMaker
    loop: asyncio.AbstractEventLoop | None
    address: str = ""

    def join(self, address: str) -> tuple[Connection, Target]:
        self.address = address
        connection, replica, settings = _join(address, None)
        try:
            [target] = make_targets(ROLLOUT_ROLE, self.set_up(settings, replica), self.loop)
        except BaseException:
            connection.close()
            raise
        return connection, target

    def answer(self, connection: Connection, target: Target) -> None:
        """Answer the calls of each callback until it ends."""
        while True:
            _answer(connection, target)
            connection, target = self._join_next()

    def _join_next(self) -> tuple[Connection, Target]:
        while True:
            address = _callback_in(self.folder)
            if address in ("", self.address):
                time.sleep(_LOOK_S)
                continue
            try:
                return self.join(address)
            except Exception as error:
                logger.error("the next callback of %s: %s", self.folder, error)


def _callback_in(folder: Path) -> str:
    """Return the address of a callback that lives; empty unless this user, and nobody else, can
    have written its file.

    The messages at the socket are unpickled, so the writer of the file could run any code here.
    """
    try:
        with opened(folder / CALLBACK) as file:
            state = os.fstat(file.fileno())
            if state.st_uid != os.geteuid() or state.st_mode & _OTHERS_WRITE:
                return ""
            place = msgspec.json.decode(file.read(), type=CallbackPlace)
    except (OSError, *UNDECODABLE):
        return ""
    return place.address if place.process.alive() else ""


class _Member:
    """The callback's end of the connection to a process that has joined.

    Attributes:
        pid: Id of the process.
        ended: Whether the connection has closed.
    """

    def __init__(self, connection: Connection, pid: int) -> None:
        self.pid, self.ended = pid, False
        self._ended_ns = 0
        self._connection = connection
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._waiting: deque[Future[Any]] = deque()
        self._lock = threading.Lock()

    def call(self, future: Future[Any], method: str, arguments: tuple[Any, ...]) -> None:
        """Queue a call for sending; its reply sets the future."""
        with self._lock:
            self._waiting.append(future)
            if self.ended:
                self._fail()
            else:
                self._calls.put((method, arguments))

    def send(self) -> None:
        """Send the queued calls, on a thread: the socket of a process that does not read blocks."""
        with suppress(OSError):  # it has ended, which the other thread notices
            while (call := self._calls.get()) is not None:
                self._connection.send(call)

    def read(self) -> None:
        """Read the replies until the process ends."""
        try:
            while True:
                reply, problem = self._connection.recv()
                future = self._waiting.popleft()
                if problem is None:
                    future.set_result(reply)
                else:  # an exception of the same name: only the other process may know the class
                    name, text = problem
                    future.set_exception(type(name, (Exception,), {})(text))
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                logger.error("the replies of pid %d cannot be read: %s", self.pid, error)
        with self._lock:
            self.ended, self._ended_ns = True, clock.now_ns()
            self._calls.put(None)
            self._fail()

    def _fail(self) -> None:
        """Set an error on the calls without a reply, because the process has ended."""
        while self._waiting:
            error = WorkerLostError(f"has ended (pid {self.pid})")
            error.pid, error.at_ns = self.pid, self._ended_ns
            self._waiting.popleft().set_exception(error)


def join_callback(
    worker: Any, address: str, rank: int, *, loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Let the callback of another process of this host call a worker of this process.

    Without such a callback, an error is logged, and this process goes on without captures.

    Args:
        worker: The worker, after its ``init_capture``.
        address: ``address`` of the callback's :class:`WorkerProcesses`.
        rank: Index of this process in the role, from 0; of a rollout, index of the replica.
        loop: Event loop on which the worker's coroutines run.

    Raises:
        ConfigError: The worker has no capture methods, or the rank is no number.
    """
    rank = value_of(int, rank, "join_callback: rank")
    [target] = make_targets("worker", worker, loop)
    try:
        connection, _, _ = _join(address, rank)
    except CaptureStateError as error:
        logger.error("%s", error)
        return
    _start(_answer, connection, target)


def _join(address: str, rank: int | None) -> tuple[Connection, int, dict[str, Any] | None]:
    """Join a callback; return the connection, the rank and the callback's settings.

    Args:
        address: Address of the callback's :class:`WorkerProcesses`.
        rank: The rank; ``None`` for the first free one.

    Raises:
        CaptureStateError: There is no callback, or it refuses.
    """
    try:
        connection = Client(address)
        connection.send((rank, os.getpid()))
        if not connection.poll(_ANSWER_S):
            raise TimeoutError("it does not answer")
        refusal, rank, settings = connection.recv()
    except (EOFError, OSError) as error:
        raise CaptureStateError(
            f"no callback listens at {address}, so nothing here is captured: {error}; start the "
            "loop first, or correct the address"
        ) from error
    if refusal:
        raise CaptureStateError(f"nothing of this process is captured: {refusal}")
    _connections.add(connection)
    return connection, rank, settings


def _answer(connection: Connection, target: Target) -> None:
    """Answer calls until the process of the callback ends; then stop an open capture."""
    try:
        while True:
            method, arguments = connection.recv()
            call = _called(target, method, *arguments)
            error = call.error
            problem = None if error is None else (type(error).__name__, str(error))
            connection.send((call.reply(), problem))
    except (EOFError, OSError):
        connection.close()
        _called(target, "stop_capture")
        _called(target, "read_watch", WatchQuestion(hangs=NO_LOOKS))


def _called(target: Target, method: str, *arguments: Any) -> Call:
    """Call the worker of this process, and wait for its reply."""
    [call] = target.call(method, *arguments)
    call.timeout_s = _NO_LIMIT_S
    wait_for([call])
    return call
