"""Calls the callback for an engine without a trainer, e.g. a vLLM server that the plugin hooked.

There is no training loop, so requests make the steps. A step begins with a request, and ends when
the engine has had none for a second. Longer work is divided into several steps. If methods of the
engine return a whole batch, like ``LLM.generate``, each call is a step.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import msgspec
from msgspec.structs import replace as changed

from verl_profiling import ProfilingCallback, ProfilingConfig, clock
from verl_profiling.capture.session import process_session
from verl_profiling.controller.controller import Controller
from verl_profiling.controller.run_claim import check_folder
from verl_profiling.engines import adapter_named
from verl_profiling.engines.replica import IdleReplica, Replica, make_replica
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.files.opener import read_small
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import MAX_NS, WAIT_FOR_REQUESTS
from verl_profiling.workers.processes import join_run

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_LOOK_FOR_END_S = 0.25  # a look takes 0.1 ms of an engine that may use one core alone
_PAUSE_S = 1.0  # shorter pauses are between two requests of one client, not between two rollouts
_STEPS_IN_A_HANG = 3  # the watch reports a hang after three usual steps without a token
_EXIT_S = 5.0

_started: WeakSet[Any] = WeakSet()


@cache
def settings(place: str) -> ProfilingConfig | None:
    """Return the settings of a run; ``None``, with a line in the log, if they are wrong.

    Args:
        place: The run's folder, or a file with settings.
    """
    try:
        given = ProfilingConfig.from_any(_read(place))
        config = replace(given, enable=True, spmd=False, strict=False)
        check_folder(config)
    except Exception as error:
        _say(error)
        return None
    return config


def _read(place: str) -> dict[str, Any]:
    if Path(place).suffix not in (".yaml", ".yml", ".json"):
        return {"save_path": place, "schedule": {"steps": []}, "watch": {"enable": True}}
    values = msgspec.yaml.decode(read_small(Path(place)))
    if not isinstance(values, dict):
        raise ConfigError("", f"{place} holds no settings")
    return values


def _say(error: Exception) -> None:
    line = " ".join(str(error).split())
    logger.error("VERL_PROFILING_RUN: %s; this engine is not recorded", line)


def add_profiler(place: str, arguments: Any) -> None:
    """Set the profiler that captures need in the arguments of a vLLM engine, unless the user chose
    a profiler.

    Args:
        place: The run's folder, or a file with settings.
        arguments: The engine's ``EngineArgs``.
    """
    config = settings(place)
    given = getattr(arguments, "profiler_config", None)
    chosen = given if isinstance(given, dict) else getattr(given, "__dict__", {})
    if config is None or chosen.get("profiler") is not None:
        return
    try:
        for name, value in adapter_named("vllm").engine_args(config, ROLLOUT_ROLE).items():
            setattr(arguments, name, value)
    except Exception as error:
        _say(error)


def start_recorder(place: str, engine: Any, batch_methods: Sequence[str] = ()) -> None:
    """Start to record an engine at its first request; the engine's later calls change nothing.

    Args:
        place: The run's folder, or a file with settings.
        engine: The object that takes requests, e.g. an ``AsyncLLM``.
        batch_methods: Names of its methods that return a whole batch, e.g. ``generate``; empty for
            an engine that serves requests at any time.
    """
    config = settings(place)
    told_of = getattr(engine, "tokenizer_manager", engine)  # SGLang's Engine passes requests to it
    if config is None or told_of in _started:
        return
    _started.add(told_of)
    try:
        _check_whole(told_of)
        event_loop = None if batch_methods else asyncio.get_running_loop()
        set_up = partial(_replica, weakref.ref(engine))  # a program may delete its engine
        joins = partial(join_run, config.local_folder, set_up, event_loop)
        if joins():
            return
        callback = ProfilingCallback(config, blocks_event_loop=True)
        replica = set_up(config, 0)
        if isinstance(replica, IdleReplica):
            raise ConfigError("", replica.reason)
        callback.add_rollout(replica, loop=event_loop)
        EngineLoop(callback, replica.requests, joins).begin(engine, batch_methods)
    except Exception as error:
        _say(error)


def _check_whole(engine: Any) -> None:
    """Refuse an engine whose requests go through several processes, each of which has a part of the
    requests.

    Raises:
        ConfigError: There are several API servers of vLLM, or tokenizer workers of SGLang.
    """
    vllm_config = getattr(engine, "vllm_config", None)
    parallel = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "_api_process_count", 1) > 1:
        raise ConfigError("", "several API servers divide the requests; set --api-server-count 1")
    arguments = getattr(engine, "server_args", None)
    if getattr(arguments, "tokenizer_worker_num", 1) > 1:
        raise ConfigError("", "several tokenizer workers divide the requests; use one")


def _replica(held: Callable[[], Any], config: Any, index: int) -> Replica:
    """Return the worker of an engine, which the callback calls.

    Raises:
        CaptureStateError: The program has deleted its engine.
    """
    engine = held()
    if engine is None:
        raise CaptureStateError("the program has deleted its engine")
    return make_replica(ProfilingConfig.from_any(config), recorded(engine), replica=index)


@contextmanager
def _hidden_event_loop() -> Iterator[None]:
    """Hide the running event loop, e.g. of a notebook, from the hooks of a callback.

    That loop waits for the call of the engine, so the hooks' coroutines need another loop.
    """
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


class EngineLoop:
    """Calls the hooks of a callback for the work of one engine.

    Args:
        callback: The callback, to which the engine was added.
        requests: The log of the engine's requests.
        joins: Lets the callback of a training loop record the engine; returns whether there is one.
    """

    def __init__(
        self, callback: ProfilingCallback, requests: RequestLog, joins: Callable[[], bool]
    ) -> None:
        self._callback = callback
        self._requests = requests
        self._join_run: Callable[[], bool] | None = joins
        self._number = 0
        self._begin_s = 0.0
        self._ended_before = 0
        self._tokens: list[object] = []
        self._sums = process_session().sums
        self._longest_s = callback.config.watch.hang_s / _STEPS_IN_A_HANG
        self._longest_captured_s = callback.config.rollout.max_window_s or math.inf
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, engine: Any, batch_methods: Sequence[str]) -> None:
        """Begin the run, which ends with the process.

        Args:
            engine: The object that takes requests.
            batch_methods: Names of its methods that return a whole batch; each call is a step.
        """
        self._callback.on_train_begin()
        self._end_at_exit()
        if self._sums is not None:
            self._sums.tokens.append(self._idle_ns)
        for method in batch_methods:
            self._make_steps_of(engine, method)
        if not batch_methods:
            name = "verl-profiling-engine"
            self._thread = threading.Thread(target=self._make_steps, name=name, daemon=True)
            self._thread.start()

    def _end_at_exit(self) -> None:
        """At exit, end the run before the callback's own handler, which would close an open step
        like that of a training loop.

        Handlers that are registered last run first, so each step registers this one again.
        """
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._ended.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_EXIT_S)
        if self._sums is not None:
            self._sums.tokens.remove(self._idle_ns)
        self._callback.on_train_end()

    @_hidden_event_loop()
    def _gives_way(self) -> bool:
        """End the run if a mixin, or the callback of a training loop, records the engine from now
        on; return whether the run ended.
        """
        if not self._requests.is_replaced and self._join_run is not None:
            try:
                self._join_run()
            except Exception as error:
                self._join_run = None
                logger.error("VERL_PROFILING_RUN: %s; this engine is in no training loop", error)
        if self._requests.is_replaced:
            self._end()
        return self._requests.is_replaced

    def _idle_ns(self) -> int:
        """Return a number that the watch takes for progress when it changes.

        It changes while no engine of this process has requests, because none can hang then.
        """
        busy = self._requests.busy
        return 0 if busy is not None and busy.running else time.monotonic_ns()

    @_hidden_event_loop()
    def _begin_step(self) -> None:
        self._number += 1
        self._begin_s = time.monotonic()
        self._ended_before = self._requests.begun - self._requests.running
        self._requests.gaps.clear()
        self._callback.on_step_begin(self._number)
        self._end_at_exit()
        self._callback.on_rollout_begin()

    @_hidden_event_loop()
    def _end_step(self, error: BaseException | None = None) -> None:
        self._callback._guarded(_divide_step, self._requests)
        self._callback.on_rollout_end()
        if error is not None:
            self._callback.on_stages_end()
            self._callback.on_exception(error)
        else:
            self._callback.on_step_end()

    # An engine whose methods return a whole batch.

    def _make_steps_of(self, engine: Any, method: str) -> None:
        """Let each call of a method be a step."""
        call = getattr(engine, method, None)
        if call is None:
            return

        @functools.wraps(call)
        def in_a_step(*args: Any, **kwargs: Any) -> Any:
            if self._requests.running or self._ended.is_set():
                return call(*args, **kwargs)  # chat of an older vLLM calls generate
            if self._gives_way():
                return getattr(engine, method)(*args, **kwargs)
            self._begin_step()
            try:
                response = call(*args, **kwargs)
            except BaseException as error:
                self._end_step(error)
                raise
            self._end_step()
            return response

        setattr(engine, method, in_a_step)

    # An engine that serves requests at any time.

    def _make_steps(self) -> None:
        """Make steps until the process ends, on a thread that never blocks the engine."""
        while not self._ended.wait(_LOOK_S):
            if self._requests.running or self._callback.requested or self._requests.is_replaced:
                if self._gives_way():
                    return
                self._begin_step()
                self._wait_for_end()
                self._end_step()

    def _wait_for_end(self) -> None:
        """Wait for a second without requests, or until the step has its longest duration."""
        requests = self._requests
        while not self._ended.wait(_LOOK_FOR_END_S) and not requests.is_replaced:
            now_s = time.monotonic()
            is_idle = clock.now_ns() - requests.idle_since_ns > _PAUSE_S * 1e9
            if is_idle and requests.begun > self._ended_before:
                return
            is_captured = self._callback.capturing
            if not is_captured and self._callback.requested:
                return
            longest_s = self._longest_captured_s if is_captured else self._longest_s
            if now_s - self._begin_s > longest_s and self._makes_tokens():
                return

    def _makes_tokens(self) -> bool:
        """Return whether the engine has made a token since this method was last called; true if
        nothing counts tokens.
        """
        before = self._tokens
        self._tokens = [] if self._sums is None else [count() for count in self._sums.tokens]
        return self._tokens != before or self._sums is None


def _divide_step(controller: Controller, requests: RequestLog) -> None:
    """Begin the step and its rollout with the first request, and end them with the last one.

    Between requests, the stage is ``wait:requests`` instead of ``rollout``.
    """
    rollout, watch, capture = controller.stages.rollout, controller.watch, controller.live
    if rollout is None:
        return
    edges = [rollout.begin_ns]
    for gap in (*requests.gaps, (requests.idle_since_ns, MAX_NS)):
        edges += [max(time_ns, edges[-1]) for time_ns in gap]
    runs = [run for run in zip(edges[::2], edges[1::2], strict=False) if run[0] < run[1]]
    if not runs:
        return
    rollout.begin_ns, end_ns = runs[0][0], runs[-1][1] + 1  # the last request ends in the step
    controller.stages.end_rollout()
    if watch is not None and watch.step is not None:
        watch.step.begin_ns = rollout.begin_ns
        watch.step_ends(end_ns)
    if capture is not None and capture.log.spans is not None:
        rollout.end_ns = runs[0][1]
        for (_, since_ns), (until_ns, last_ns) in pairwise(runs):
            wait = changed(rollout, name=WAIT_FOR_REQUESTS, begin_ns=since_ns, end_ns=until_ns)
            capture.log.spans += wait, changed(rollout, begin_ns=until_ns, end_ns=last_ns)
        span = changed(capture.step, begin_ns=rollout.begin_ns, end_ns=end_ns)
        capture.steps[-1] = span
        controller.stages.pass_to(capture.around_log)


def recorded(engine: Any) -> Any:
    """Return the engine in the form for its adapter: SGLang's tokenizer manager becomes an
    attribute of an object, any other engine stays as it is.
    """
    if hasattr(engine, "generate_request"):
        return SimpleNamespace(tokenizer_manager=engine, server_args=engine.server_args)
    return engine
