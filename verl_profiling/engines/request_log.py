"""A log of inference requests: requests that end in a capture are kept, others only counted.
Each request has a policy version. A server can report new versions during a capture; otherwise,
requests have the version that the training loop reports.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from hashlib import blake2b
from numbers import Integral
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from verl_profiling import clock
from verl_profiling.files.engine_marks import stages_since
from verl_profiling.manifest import BLOCK_TOKENS, CaptureResult, Request
from verl_profiling.watch.process_sums import Busy

_LONGEST_ID = 200
_HASH_BYTES = 6  # a JSON number below 2^53, which every reader keeps exactly
_MOST_REFUSED = 1000  # refused requests that a client may send again; the oldest are forgotten
_LEAST_GAP_NS = 10_000_000  # shorter ones are the client's time between two requests
_MOST_GAPS = 1000
_LOG, _UNLOGGED = "_verl_profiling_log", "_verl_profiling_unlogged"

_arrived_ns: ContextVar[int] = ContextVar("arrived_ns", default=0)
"""Time (unix ns) at which the HTTP request of this task came in; 0 where it is unknown."""


class RequestLog:
    """The requests of one replica, with their begins, first tokens, ends and lengths.

    A server with an engine of its own makes a log, passes it to
    :meth:`RolloutCaptureMixin.init_capture()
    <verl_profiling.workers.RolloutCaptureMixin.init_capture>` and opens a record for each request::

        with self.requests.open(prompt_tokens=len(prompt), id=request_id) as request:
            for token in self.model.generate(prompt):
                request.first_token()
                request.response_tokens += 1

    Tasks and threads may use the log concurrently. A request belongs to the capture in which it
    ends. Without an open capture, ended requests are forgotten.

    Attributes:
        busy: The stage of the watch that is open while any request runs; ``None`` if the watch is
            off.
        enabled: Whether requests that end in a capture are logged.
        hashes_prompts: Whether blocks of their prompts are hashed.
        policy_versions: Versions of the weights since :meth:`begin`, in order; empty if unknown.
        pending_since_ns: Begin times (ns) of the requests that were unfinished at :meth:`end`, in
            order.
        begun: Number of requests that began.
        gaps: Begin and end (ns) of each time without a request, before the last request.
        is_replaced: Whether another log has taken over the requests of the engine.
    """

    def __init__(self) -> None:
        self.busy: Busy | None = None
        self.enabled = False
        self.hashes_prompts = False
        self.policy_versions: list[int] = []
        self.pending_since_ns: list[int] = []
        self.begun = 0
        self.gaps = deque[tuple[int, int]](maxlen=_MOST_GAPS)
        self._idle_since_ns = clock.now_ns()
        self._begin_ns = 0
        self.is_replaced = False
        self.replica = 0
        self._open: set[OpenRequest] = set()
        self._refused_ns: dict[str, int] = {}
        self._ended: list[Request] | None = None
        self._policy_version: int | None = None
        self._server_knows = False

    def serve(self, replica: int, enable: bool, hash_prompts: bool = False) -> None:
        """Set the replica that the requests belong to, and what captures log of them.

        Args:
            replica: Index of the replica.
            enable: The setting ``rollout.requests``.
            hash_prompts: The setting ``rollout.prompt_hashes``.
        """
        self.replica = replica
        self.enabled = enable
        self.hashes_prompts = hash_prompts

    def set_policy_version(self, version: int) -> None:
        """Set the policy version of requests that begin from now on."""
        self._server_knows = True
        self._policy_version = version
        if self.policy_versions[-1:] != [version]:
            self.policy_versions.append(version)

    def begin(self, policy_version: int | None) -> None:
        """Start logging.

        Args:
            policy_version: Policy version from the loop; unused once the server has set one.
        """
        self._begin_ns = clock.now_ns()
        if not self._server_knows:
            self._policy_version = policy_version
        self.policy_versions = [] if self._policy_version is None else [self._policy_version]
        self._ended = [] if self.enabled else None

    def end(self) -> list[Request]:
        """Stop logging; return the requests that ended since :meth:`begin`."""
        ended, self._ended = self._ended, None
        if not self._server_knows:
            self._policy_version = None
        self.pending_since_ns = (
            sorted(request.begin_ns for request in list(self._open)) if self.enabled else []
        )
        return ended or []

    @property
    def recording(self) -> bool:
        """Whether requests that end now are logged."""
        return self._ended is not None

    def end_in_result(self, result: CaptureResult) -> CaptureResult:
        """Stop logging; return the capture's result with the requests, sleeps and wakes.

        Args:
            result: The result of the process that recorded the replica.
        """
        requests, versions = self.end(), list(self.policy_versions)
        stages = [*result.stages, *stages_since(self._begin_ns)]
        return msgspec.structs.replace(
            result,
            stages=sorted(stages, key=attrgetter("begin_ns", "depth")),
            requests=[*result.requests, *requests],
            policy_versions=list(dict.fromkeys([*result.policy_versions, *versions])),
            requests_logged=result.requests_logged or self.enabled,
            pending_since_ns=[*result.pending_since_ns, *self.pending_since_ns],
        )

    @property
    def running(self) -> int:
        """Number of the requests that run."""
        return len(self._open)

    def watch_calls(
        self, engine: Any, logged: Callable[..., Any], method: str = "generate"
    ) -> None:
        """Wrap the method of an engine that returns a whole batch.

        Args:
            engine: The engine.
            logged: Function that is called with the original method and its arguments. It
                calls the method and logs the requests.
            method: Name of the method.
        """
        generate = self._unlogged(engine, method)

        @functools.wraps(generate)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return logged(generate, *args, **kwargs)

        self._put(engine, method, watched, generate)

    def watch_streams(self, engine: Any, method: str, logged: Callable[..., Any]) -> None:
        """Wrap the method of an engine that returns the stream of a request.

        Args:
            engine: The engine.
            method: Name of the method.
            logged: Function that gets the original stream and the arguments of the call, and
                returns a wrapped stream.
        """
        generate = self._unlogged(engine, method)

        @functools.wraps(generate)
        def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            stream: AsyncGenerator[Any, None] = generate(*args, **kwargs)
            return (
                stream
                if self.busy is None and not self.enabled
                else logged(stream, *args, **kwargs)
            )

        self._put(engine, method, watched, generate)

    def _unlogged(self, engine: Any, method: str) -> Any:
        """Return a method without the wrapper of an earlier log, which gets no further requests."""
        function = getattr(engine, method)
        earlier: RequestLog | None = getattr(function, _LOG, None)
        if earlier is not None:
            earlier.is_replaced = True
        return getattr(function, _UNLOGGED, function)

    def _put(self, engine: Any, method: str, watched: Any, unlogged: Any) -> None:
        setattr(watched, _LOG, self)
        setattr(watched, _UNLOGGED, unlogged)
        setattr(engine, method, watched)

    def open(self, prompt_tokens: int = 0, id: str = "") -> OpenRequest:
        """Return the record of a request that begins now, for a ``with`` block.

        Args:
            prompt_tokens: Length of the prompt, if it is known already.
            id: The client's id of the request; a span with ``request=id`` refers to it.
        """
        begin_ns = self._refused_ns.pop(id, 0) or _taken_arrival_ns() or clock.now_ns()
        request = OpenRequest(id, prompt_tokens, self, self._policy_version, begin_ns)
        if not self._open and begin_ns - self._idle_since_ns > _LEAST_GAP_NS:
            self.gaps.append((self._idle_since_ns, begin_ns))
        self._open.add(request)
        self.begun += 1
        return request

    def count(self, request: OpenRequest, end_ns: int, failed: bool) -> None:
        """Count a response that has ended, for the watch; its request no longer runs."""
        self._discard(request)
        if self.busy is not None:
            self.busy.sums.spans.add(self.busy.name, request.begin_ns, end_ns, failed)

    def _discard(self, request: OpenRequest) -> None:
        self._open.discard(request)
        if not self._open:
            self._idle_since_ns = clock.now_ns()

    @property
    def idle_since_ns(self) -> int:
        """End of the last request (ns); now while one runs."""
        return clock.now_ns() if self._open else self._idle_since_ns

    def refuse(self, request: OpenRequest) -> None:
        """Forget a refused request; let the next request with the same id begin when it began.

        A paused engine refuses requests, and the client sends them again.
        """
        self._discard(request)
        if not request.id:
            return
        self._refused_ns[request.id] = request.begin_ns
        while len(self._refused_ns) > _MOST_REFUSED:
            del self._refused_ns[next(iter(self._refused_ns))]

    def keep(self, request: Request) -> None:
        """Keep a request that ended during a capture, for the capture's result."""
        if (ended := self._ended) is not None:
            ended.append(request)


class OpenRequest(msgspec.Struct, eq=False):
    """A running request; the end of its ``with`` block ends it.

    A request whose block raises, or is cancelled, has failed. The server sets attributes inside the
    block; times are unix nanoseconds of this process's clock.

    Attributes:
        id: The client's id of the request.
        prompt_tokens: Length of the prompt.
        begin_ns: Begin of the request.
        response_tokens: Length of the response so far.
        arrival_ns: Arrival at the engine's scheduler; 0 if unknown.
        scheduled_ns: Time of first scheduling; 0 if unknown.
        first_token_ns: First token in the engine; if 0, the time of the call of :meth:`first_token`
            is taken.
        last_token_ns: Last token in the engine; 0 if unknown.
        cached_tokens: Prompt tokens that came from a prefix cache; ``None`` if unknown.
        preemptions: Number of preemptions by the scheduler; ``None`` if unknown.
        prompt_ids: Token ids of the prompt, for the setting ``rollout.prompt_hashes``; empty if
            unknown. They are hashed, not kept.
    """

    id: str
    prompt_tokens: int
    _log: RequestLog
    _policy_version: int | None
    begin_ns: int
    response_tokens: int = 0
    arrival_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    cached_tokens: int | None = None
    preemptions: int | None = None
    prompt_ids: Sequence[int] = ()
    _first_output_ns: int = 0
    _closed: bool = False
    _refused: bool = False
    _kept: list[Request] = []

    def __enter__(self) -> OpenRequest:
        if self._log.busy is not None:
            self._log.busy.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._log.busy is not None:
            self._log.busy.__exit__()
        if not self._closed:
            self.close(self.prompt_tokens, self.response_tokens, failed=kind is not None)
        if len(self._kept) > 1:
            self._end_apart()

    def _end_apart(self) -> None:
        """Let each response of a batch end with its last token: all closed as the call returned.

        The response with the latest token holds the call until then.
        """
        last_ns = [request.last_token_ns for request in self._kept]
        for request in self._kept:
            if not request.last_token_ns:
                force_setattr(request, "ends_with_batch", True)
            elif request.last_token_ns < max(last_ns) or not all(last_ns):
                force_setattr(request, "end_ns", request.last_token_ns)

    def first_token(self) -> None:
        """Record the arrival of the first output; later calls have no effect."""
        if not self._first_output_ns:
            self._first_output_ns = clock.now_ns()

    def refused(self) -> None:
        """Record that the engine, which is paused, refused the request before any work on it."""
        self._refused = self._closed = True
        self._log.refuse(self)

    def close(self, prompt_tokens: int, response_tokens: int, *, failed: bool = False) -> None:
        """Record the end of the request.

        For a batch of responses, the server calls this method once per response. Each then ends at
        its ``last_token_ns``; without it, its end and its latency are unknown.

        Args:
            prompt_tokens: Length of the prompt.
            response_tokens: Length of the response.
            failed: Whether the request raised, was cancelled or was aborted.
        """
        if self._refused:
            return
        self._closed = True
        end_ns = clock.now_ns()
        self._log.count(self, end_ns, failed)
        if not self._log.recording:
            return
        arrival_ns, scheduled_ns, first_ns, last_ns = self._engine_times(end_ns)
        request = Request(
            replica=self._log.replica,
            id=_readable(self.id),
            begin_ns=self.begin_ns,
            arrival_ns=arrival_ns,
            scheduled_ns=scheduled_ns,
            first_token_ns=first_ns,
            last_token_ns=last_ns,
            end_ns=end_ns,
            prompt_tokens=_count(prompt_tokens) or 0,
            response_tokens=_count(response_tokens) or 0,
            cached_tokens=_count(self.cached_tokens),
            preemptions=_count(self.preemptions),
            policy_version=self._policy_version,
            failed=failed,
            prompt_blocks=block_hashes(self.prompt_ids) if self._log.hashes_prompts else (),
        )
        self._kept.append(request)
        self._log.keep(request)

    def _engine_times(self, end_ns: int) -> tuple[int, int, int, int]:
        """Return the times of arrival, scheduling, first and last token (ns); 0 if unknown.

        If one is out of order, none of the engine's times is trusted: only the time of the first
        output in this process is returned.
        """
        first_ns = self.first_token_ns or self._first_output_ns
        times = (self.arrival_ns, self.scheduled_ns, first_ns, self.last_token_ns)
        before = self.begin_ns
        for time_ns in times:
            if time_ns and not before <= time_ns <= end_ns:
                return 0, 0, self._first_output_ns, 0
            before = time_ns or before
        return times


def note_arrival() -> None:
    """Let the first request to an engine that this task makes begin now, with its HTTP request."""
    _arrived_ns.set(clock.now_ns())


def _taken_arrival_ns() -> int:
    time_ns = _arrived_ns.get()
    if time_ns:
        _arrived_ns.set(0)  # an HTTP request that runs tools makes several requests in a row
    return time_ns


def block_hashes(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a hash of each block of :data:`BLOCK_TOKENS` tokens, with all blocks before it.

    So two prompts have as many equal hashes as they share blocks from their begin, the rule by
    which engines share their KV cache. The last block may be shorter.

    Args:
        ids: Token ids of a prompt.
    """
    tokens, digest = array("q", ids), b""
    hashes = []
    for first in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[first : first + BLOCK_TOKENS].tobytes()
        digest = blake2b(digest + block, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(digest, "big"))
    return tuple(hashes)


def _count(value: object) -> int | None:
    """Return a count, or ``None`` for an unknown count, e.g. vLLM's -1."""
    return int(value) if isinstance(value, Integral) and int(value) >= 0 else None


def _readable(id: object) -> str:
    """Return a client's id as valid UTF-8 of at most 200 characters, like the ids in spans."""
    return str(id)[:_LONGEST_ID].encode(errors="replace").decode()
