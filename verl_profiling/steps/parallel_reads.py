"""Runs functions that read one file: in this process, in several processes, or as tasks of a Ray
cluster.

A task runs on the host that has the file, and only its result travels.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.steps.step import Source

T = TypeVar("T")

_THREADS = Path("/proc/self/task")  # has one entry per thread, including threads of libraries
_CONNECT_S = 5.0
_TASKS_PER_NODE = 8  # limit, on average: tasks reserve no CPU, and their results wait in memory
_SPAWN_BYTES = 8 << 20  # for smaller inputs, starting processes takes longer than it saves


def results(
    calls: Sequence[tuple[Callable[[], T], Sequence[Source]]], ray: str | None, jobs: int = 1
) -> Iterator[T | TraceFormatError]:
    """Yield the result of each call in order; for an unreadable file, the error.

    Args:
        calls: Picklable functions, each with the files that it reads, which lie on one host.
        ray: Address of a Ray cluster; ``None`` for this host.
        jobs: Number of processes on this host.

    Raises:
        ToolUnavailableError: Ray is not installed, or no cluster runs at the address.
    """
    if ray is not None:
        yield from _of_tasks(calls, ray)
        return
    functions = [call for call, _ in calls]
    size = 0
    for _, files in calls:
        for file in files:
            with suppress(OSError, ValueError):  # it is missing, or a manifest's name of it is none
                size += file.path.stat().st_size
    jobs = min(jobs, len(calls))
    if jobs < 2 or size < _SPAWN_BYTES:
        yield from map(_result, functions)
    else:  # most steps are small, and need none of it
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(jobs, mp_context=get_context(_start_method())) as pool:
            yield from pool.map(_result, functions)


def _result(call: Callable[[], T]) -> T | TraceFormatError:
    try:
        return call()
    except TraceFormatError as error:
        return error


def _start_method() -> Literal["fork", "spawn"]:
    """Return the start method for processes: ``fork``, or ``spawn`` if this process has threads.

    Forked processes start faster, because they import nothing. But they copy locks that threads
    hold, without threads to release them.
    """
    try:
        if len(list(_THREADS.iterdir())) == 1:
            return "fork"
    except OSError:  # a system without /proc
        pass
    return "spawn"


def _of_tasks(
    calls: Sequence[tuple[Callable[[], T], Sequence[Source]]], address: str
) -> Iterator[T | TraceFormatError]:
    """Yield the results of Ray tasks; files of this host that no task could read are read here."""
    ray = _connected(address)
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(_result_there)  # a training may hold all CPUs

    def started(call: Callable[[], T], files: Sequence[Source]) -> Any:
        host = files[0].host
        node = nodes.get(host)
        if host and not node:
            return None
        stamps = {}
        if not host:
            stamps = {file.path: _stamp(file.path) for file in files}
        where = NodeAffinitySchedulingStrategy(node, soft=False) if node else "SPREAD"
        return task.options(scheduling_strategy=where).remote(call, stamps)

    waiting = iter(calls)
    tasks = deque[Any]()  # a task is freed once its result is here
    try:
        for call, (file, *_) in calls:
            free = _TASKS_PER_NODE * len(nodes) - len(tasks)
            tasks += [started(*calling) for calling in islice(waiting, free)]
            result: Any = None
            why = "no node of the Ray cluster has this host name"
            if tasks[0] is not None:
                try:
                    result = ray.get(tasks[0])
                except RayError as error:  # the node died, or the process was killed
                    why = f"the task ended with {type(error).__name__}"
            tasks.popleft()
            if result is None and file.host:
                result = TraceFormatError(file.path, f"cannot be read on {file.host}: {why}")
            if result is None:
                result = _result(call)
            yield result
    finally:
        for left in filter(None, tasks):
            ray.cancel(left)


def _result_there(
    call: Callable[[], T], stamps: Mapping[Path, tuple[int, int] | None]
) -> T | TraceFormatError | None:
    """Return the result of a call; ``None`` if this host does not see the files of the calling
    host.

    This host may have another file at a path, e.g. of an older run; size and time tell them apart.

    Args:
        call: The function that reads the files.
        stamps: Size and time of each file on the calling host.
    """
    for path, stamp in stamps.items():
        if stamp is None or _stamp(path) != stamp:
            return None
    return _result(call)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return size (bytes) and time of the last change (ns) of a file;
    ``None`` if there is no such file.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _connected(address: str) -> Any:
    """Return the module ``ray``, connected to a cluster.

    Raises:
        ToolUnavailableError: Ray is not installed, or no cluster runs at the address.
    """
    try:
        import ray

        if not ray.is_initialized():
            host, _, port = address.rpartition(":")
            if port.isdecimal():  # ray.init waits for minutes, and then exits
                socket.create_connection(
                    (host.rpartition("/")[2].strip("[]"), int(port)), _CONNECT_S
                ).close()
            ray.init(address, log_to_driver=False, configure_logging=False)
    except ImportError as error:
        raise ToolUnavailableError(
            f"--ray needs {error.name}: pip install 'verl-profiling[train]'"
        ) from error
    except SystemExit as error:
        raise ToolUnavailableError(f"--ray {address}: the cluster does not answer") from error
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ToolUnavailableError(f"--ray {address}: {str(error).partition('. ')[0]}") from error
    return ray
