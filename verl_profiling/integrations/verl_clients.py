"""Requests of verl's agent loops: which request of which engine a trajectory waits for.

Every turn is a request of its own, and its id is made inside of the client that sends it; so the id is
noted there, on the span of the task that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from verl_profiling.integrations.wrapping import around_async, missing, wrap
from verl_profiling.trajectories import current_trajectory, span

__all__ = ["hook_clients", "hook_teachers"]

_ABORTED = ("aborted", "abort")

_name: ContextVar[str] = ContextVar("verl_profiling_request_of", default="generate")
_asking: ContextVar[Any] = ContextVar("verl_profiling_asking", default=None)
_pause: ContextVar[_Pause | None] = ContextVar("verl_profiling_pause", default=None)
_prepared: set[type[Any]] = set()


class _Pause:
    """The while between a request that a weight update aborted, and the one that goes on with it."""

    def __init__(self) -> None:
        self._span: Any = None

    def begin(self) -> None:
        self._span = span("wait:resume")
        self._span.__enter__()

    def end(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None


def hook_clients(module: Any) -> None:
    """Record the requests of ``LLMServerClient``, and of the clients that resume aborted ones."""
    for name in _PARTS:
        if not hasattr(module.LLMServerClient, name):
            missing(module.LLMServerClient, name)
    wrap(module.LLMServerClient, "generate", _as_request)
    resuming = getattr(module, "FullyAsyncLLMServerClient", None)
    if resuming is not None and "generate" in vars(resuming):
        wrap(resuming, "generate", _with_pauses)


def hook_teachers(module: Any) -> None:
    """Name the requests to teachers ``teacher``: their engines are not captured."""
    wrap(module.AsyncTeacherLLMServerManager, "compute_teacher_logprobs_single", around_async(_teaching))


def _as_request(generate: Callable[..., Any]) -> Callable[..., Any]:
    async def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        _prepare(type(self))
        pause = _pause.get()
        if pause is not None:
            pause.end()
        with span(_name.get()) as opened:
            token = _asking.set(opened)
            try:
                output = await generate(self, *args, **kwargs)
            finally:
                _asking.reset(token)
        aborted = getattr(output, "stop_reason", None) in _ABORTED
        if aborted and pause is not None:
            pause.begin()
        _note_abort(aborted)
        return output

    return request


def _note_abort(aborted: bool) -> None:
    """Let the trajectory's fate be that of its last request."""
    running = current_trajectory()
    if running is not None and (aborted or running.fate == "aborted"):
        running.fate = "aborted" if aborted else ""


def _with_pauses(generate: Callable[..., Any]) -> Callable[..., Any]:
    async def resumed(self: Any, *args: Any, **kwargs: Any) -> Any:
        pause = _Pause()
        token = _pause.set(pause)
        try:
            return await generate(self, *args, **kwargs)
        finally:
            pause.end()
            _pause.reset(token)

    return resumed


def _prepare(client_class: type[Any]) -> None:
    """Hook what a client class does for a request, a user's own class included."""
    if client_class in _prepared:
        return
    _prepared.add(client_class)
    for name, wrapper in _PARTS.items():
        if hasattr(client_class, name):
            wrap(client_class, name, wrapper)


def _noted_id(make_id: Callable[..., str]) -> Callable[..., str]:
    def request_id(self: Any, *args: Any, **kwargs: Any) -> str:
        made = make_id(self, *args, **kwargs)
        asking = _asking.get()
        if asking is not None:
            asking.request = str(made)
        return made

    return request_id


@contextmanager
def _teaching() -> Iterator[None]:
    token = _name.set("teacher")
    try:
        yield
    finally:
        _name.reset(token)


_PARTS = {"_acquire_server": around_async(partial(span, "wait:server")), "_vllm_request_id": _noted_id}
"""What a client does for each request."""
