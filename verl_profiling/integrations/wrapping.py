"""Puts code around functions of another package; what a version of it does not have is noted by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["around", "around_async", "missing", "noting", "wrap"]

Function = Callable[..., Any]

_notes: list[list[str]] = []


@contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Append to ``notes`` the name of everything that is missing meanwhile."""
    _notes.append(notes)
    try:
        yield
    finally:
        _notes.pop()


def missing(owner: Any, name: str) -> None:
    """Note that a module or class has no such function."""
    if _notes:
        _notes[-1].append(f"{owner.__qualname__}.{name}" if isinstance(owner, type) else name)


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> bool:
    """Replace a function of a module, or a method of a class, by what ``wrapper`` makes of it.

    One that is not there, or does not begin with the arguments that its replacement names, is noted and
    left alone. Not for one that looks who calls it: verl's ``auto_await`` gives a coroutine to a coroutine
    alone.

    Args:
        owner: The module, the class, or an object.
        name: The function's name; an inherited method is replaced in ``owner`` alone.
        wrapper: Takes the function, returns the one that stands for it.

    Returns:
        Whether it was replaced.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        missing(owner, name)
        return False
    replacement = wrapper(function)
    wanted = _named_arguments(replacement)
    if _named_arguments(function)[: len(wanted)] != wanted:
        missing(owner, f"{name}({', '.join(wanted)})")
        return False
    setattr(owner, name, functools.wraps(function)(replacement))
    return True


def _named_arguments(function: Function) -> list[str]:
    """Return the arguments that can be given by position and by name."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def around(opened: Callable[[], AbstractContextManager[Any]]) -> Callable[[Function], Function]:
    """Return a wrapper for functions: each call runs inside of what ``opened()`` returns."""

    def wrapper(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            with opened():
                return function(*args, **kwargs)

        return call

    return wrapper


def around_async(opened: Callable[[], AbstractContextManager[Any]]) -> Callable[[Function], Function]:
    """Return the same for coroutine functions."""

    def wrapper(function: Function) -> Function:
        async def call(*args: Any, **kwargs: Any) -> Any:
            with opened():
                return await function(*args, **kwargs)

        return call

    return wrapper
