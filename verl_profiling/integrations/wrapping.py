"""Puts code around functions of another package; what a version of it does not have is left out, by name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["around", "around_async", "leave_out", "left_out", "warn_of_what_is_left_out", "wrap"]

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

left_out: list[str] = []
"""What was not found in this process, as ``module.Class.method``."""


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Replace a function of a module, or a method of a class, by what ``wrapper`` makes of it.

    Not for one that looks who calls it: verl's ``auto_await`` gives a coroutine to a coroutine alone.

    Args:
        owner: The module, the class, or an object.
        name: The function's name; an inherited method is replaced in ``owner`` alone.
        wrapper: Takes the function, returns the one that stands for it.
    """
    function = getattr(owner, name, None)
    if callable(function):
        setattr(owner, name, functools.wraps(function)(wrapper(function)))
    else:
        leave_out(owner, name)


def leave_out(owner: Any, name: str) -> None:
    """Keep in mind that a module or class has no such function."""
    place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    left_out.append(f"{place}.{name}")


def warn_of_what_is_left_out() -> None:
    """Say what this process will not record."""
    if left_out:
        logger.warning("profiling: this version has no %s; what it does is not recorded", ", ".join(left_out))


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
