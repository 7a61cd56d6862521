"""Marks calls of engines in the engines' own processes: their start, sleep and wake.

A call inside a marked call is a part of it. vLLM's allocator copies and releases one allocation
after another, thousands of them; so a part is the sum of its calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from verl_profiling import clock
from verl_profiling.files.engine_marks import SLEEP, EngineMark, is_collecting, write_marks
from verl_profiling.files.process_marks import IMPORT, created_ns
from verl_profiling.integrations.hooks import mark, wrap

Calls = Mapping[tuple[str, str], Mapping[str, str]]
_ALLOCATOR = "vllm.device_allocator.cumem"


class _Call:
    """A marked call that is open, with the time (ns) and bytes of each part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin_ns = self.last_ns = clock.now_ns()
        self.is_in_part = False
        self.parts: dict[str, list[int]] = {}

    def add(self, name: str, begin_ns: int, size: int = 0) -> None:
        """Add a part that ends now."""
        self.last_ns = clock.now_ns()
        total = self.parts.setdefault(name, [0, 0])
        total[0] += self.last_ns - begin_ns
        total[1] += size

    def marks(self) -> Iterator[EngineMark]:
        """Yield the marks of the call, which ends now."""
        yield EngineMark(self.name, self.begin_ns, clock.now_ns())
        begin_ns = self.begin_ns
        for name, (took_ns, size) in self.parts.items():
            yield EngineMark(f"{self.name}/{name}", begin_ns, begin_ns + took_ns, size)
            begin_ns += took_ns


class _Open(threading.local):
    """The open call of a thread."""

    call: _Call | None = None


_open = _Open()


@contextmanager
def _marked(name: str) -> Iterator[None]:
    """Mark a block as a call, or as a part of the open call."""
    if _open.call is not None:
        with _part(name):
            yield
        return
    call = _open.call = _Call(name)
    try:
        yield
    finally:
        _open.call = None
        write_marks(call.marks())


@contextmanager
def _part(name: str, size: int = 0, before: str = "") -> Iterator[None]:
    """Mark a block as a part of the open call, if there is one, and no part is open in it.

    Args:
        name: Name of the part.
        size: Bytes that the block moves.
        before: Name of the part between the last part and this one; empty for none.
    """
    call = _open.call
    if call is None or call.is_in_part:
        yield
        return
    if before:
        call.add(before, call.last_ns)
    begin_ns = clock.now_ns()
    call.is_in_part = True
    try:
        yield
    finally:
        call.is_in_part = False
        call.add(name, begin_ns, size)


def mark_calls(calls: Calls, hook: Callable[[str, Any], None]) -> None:
    """Mark the calls of an engine in this process.

    Args:
        calls: Names of the marks by method, of each module and class.
        hook: Lets a function change a module after its import.
    """
    created = created_ns()
    if created is not None and not is_collecting():
        write_marks([EngineMark(IMPORT, created, clock.now_ns())])
    for (module, owner), names in calls.items():
        hook(module, partial(_mark_methods, owner, names))
    hook(_ALLOCATOR, _mark_allocator)


def _mark_methods(owner: str, names: Mapping[str, str], module: Any) -> None:
    methods = vars(getattr(module, owner, object))
    for method, name in names.items():
        if method not in methods:
            continue
        if name:
            mark(getattr(module, owner), method, partial(_marked, name))
        else:
            wrap(getattr(module, owner), method, _by_tag)


def _by_tag(function: Callable[..., Any], self: Any, tag: str) -> Any:
    """Mark what SGLang's saver does with one kind of memory, e.g. ``kv_cache``."""
    with _marked(tag):
        return function(self, tag)


def _mark_allocator(module: Any) -> None:
    for name, part in (("unmap_and_release", "release"), ("create_and_map", "reserve")):
        wrap(module, name, partial(_sized, part))
    # Of this module alone. In a worker of vLLM 0.32, it took 0.4 s of each sleep and each wake.
    module.gc = SimpleNamespace(collect=module.gc.collect)
    mark(module.gc, "collect", partial(_part, "gc"))
    if module.libcudart is not None:
        wrap(module.libcudart, "cudaMemcpy", _copied)


def _sized(part: str, function: Callable[..., Any], *args: Any) -> Any:
    with _part(part, args[0][1]):
        return function(*args)


def _copied(function: Callable[..., Any], *args: Any) -> Any:
    """Mark a copy. Before it, a sleep pins host memory; a wake has reserved memory."""
    is_sleep = _open.call is not None and _open.call.name == SLEEP
    part, before = ("offload", "pin") if is_sleep else ("weights", "")
    with _part(part, args[2], before):
        return function(*args)
