"""Workers in processes that Python started itself, by ``multiprocessing`` or ``subprocess``.

The loop's process listens at a socket of this host. Another process joins once; a thread of it then
answers the callback's calls in order, until either process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from verl_profiling.controller.targets import Call, Target, WorkerLostError, make_targets, wait_for
from verl_profiling.typed_values import Positive, value_of
from verl_profiling.watch.sums import NO_LOOKS, WatchQuestion

logger = logging.getLogger(__name__)

_AT_ONCE = 128
"""Processes that may join at the same time: Linux lets no more wait by default before 5.4."""

_NO_LIMIT_S = 1e9
"""Timeout of a call here: it is the callback that waits with a timeout."""

_connections: WeakSet[Connection | Listener] = WeakSet()


def _close_inherited() -> None:
    """Close the copies of a forked child: else they hide the end of a process."""
    for connection in [*_connections]:
        connection.close()


os.register_at_fork(after_in_child=_close_inherited)


def _start(function: Callable[..., None], *arguments: object) -> None:
    """Start a thread that does not hold up the end of its process."""
    name = "verl-profiling-processes"
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


class WorkerProcesses:
    """The processes of a role, for ``add_workers`` or ``add_rollout``.

    Args:
        size: Number of processes.

    Raises:
        ConfigError: The size is no number of processes.

    Attributes:
        world_size: The same number.
        address: The argument of :func:`join_callback` in these processes.
    """

    def __init__(self, size: int) -> None:
        self.world_size: int = value_of(Positive, size, "WorkerProcesses")
        self._members: list[_Member | None] = [None] * self.world_size
        self._lock = threading.Lock()
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
                clause = "has not joined: call join_callback(worker, address, rank=...) in it"
                future.set_exception(WorkerLostError(clause))
            else:
                member.call(future, method, arguments)
            futures.append(future)
        return futures

    def close(self) -> None:
        """Accept no further processes; those that have joined stay."""
        self._closed = True
        with suppress(OSError):  # closed already
            Client(self.address).close()  # ends the wait for the next one

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
            member = _Member(connection, pid)
            refusal = self._refusal(rank, member)
            connection.send(refusal)
        except (EOFError, OSError):  # it has ended meanwhile
            return
        if refusal:
            logger.warning("a process (pid %d) is not captured: %s", pid, refusal)
        else:
            _start(member.send)
            member.read()

    def _refusal(self, rank: int, member: _Member) -> str:
        """Take a process as a rank; return the reason if that is not possible, else nothing."""
        with self._lock:
            if not 0 <= rank < self.world_size:
                return f"rank {rank} is none of {self.world_size} processes, which count from 0"
            earlier = self._members[rank]
            if earlier is not None and not earlier.ended:
                return f"rank {rank} has joined already (pid {earlier.pid}); pass another rank"
            self._members[rank] = member
            return ""


class _Member:
    """A process that has joined.

    Attributes:
        pid: Its number.
        ended: Whether its connection has closed.
    """

    def __init__(self, connection: Connection, pid: int) -> None:
        self.pid, self.ended = pid, False
        self._connection = connection
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._waiting: deque[Future[Any]] = deque()
        self._lock = threading.Lock()

    def call(self, future: Future[Any], method: str, arguments: tuple[Any, ...]) -> None:
        """Have a call sent, whose reply sets the future."""
        with self._lock:
            self._waiting.append(future)
            if self.ended:
                self._fail()
            else:
                self._calls.put((method, arguments))

    def send(self) -> None:
        """Send the calls: on a thread, as the socket of a stopped process takes only so many."""
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
                else:  # of that name: the class itself may be known to the other process only
                    name, text = problem
                    future.set_exception(type(name, (Exception,), {})(text))
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                logger.error("the replies of pid %d cannot be read: %s", self.pid, error)
        with self._lock:
            self.ended = True
            self._calls.put(None)
            self._fail()

    def _fail(self) -> None:
        """Let the calls fail that have no reply."""
        while self._waiting:
            self._waiting.popleft().set_exception(WorkerLostError(f"has ended (pid {self.pid})"))


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
        connection = Client(address)
        connection.send((rank, os.getpid()))
        refusal = connection.recv()
    except (EOFError, OSError) as error:
        logger.error("no callback listens at %s, so nothing here is captured: %s", address, error)
        return
    if refusal:
        logger.error("nothing of this process is captured: %s", refusal)
        return
    _connections.add(connection)
    _start(_answer, connection, target)


def _answer(connection: Connection, target: Target) -> None:
    """Answer calls until the process of the callback ends, and with it an open capture."""
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
