"""Hooks functions of frameworks, and reports functions that the installed version does not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from verl_profiling.integrations import warn_of_broken_package

_notes: list[list[str]] = []  # the lists of the open blocks of noting()


@contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Append to ``notes`` the names that :func:`missing` reports during the block."""
    _notes.append(notes)
    try:
        yield
    finally:
        _notes.pop()


def missing(owner: Any, name: str) -> None:
    """Report a function that a module or class does not have, to the block of :func:`noting`."""
    if _notes:
        _notes[-1].append(f"{owner.__qualname__}.{name}" if isinstance(owner, type) else name)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
    """Replace a function of a module or class by ``wrapper(function, *args, **kwargs)``.

    A missing function, or a function with other first arguments than the wrapper, is reported and
    not replaced. Do not wrap a function that inspects its caller: verl's ``auto_await`` returns a
    coroutine only to a coroutine.

    Args:
        owner: The module, the class, or an object.
        name: Name of the function; an inherited method is replaced in ``owner`` only.
        wrapper: The wrapper; for a coroutine function, a coroutine function.

    Returns:
        Whether the function was replaced.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        missing(owner, name)
        return False
    wanted = _named_arguments(wrapper)[1:]
    if _named_arguments(function)[: len(wanted)] != wanted:
        missing(owner, f"{name}({', '.join(wanted)})")
        return False
    setattr(owner, name, _replacement(function, wrapper))
    return True


def mark(owner: Any, name: str, opened: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run each call of a function, synchronous or not, inside the context manager ``opened()``."""

    def inside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with opened():
            return function(*args, **kwargs)

    async def awaited_inside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with opened():
            return await function(*args, **kwargs)

    wrap(
        owner,
        name,
        awaited_inside if inspect.iscoroutinefunction(getattr(owner, name, None)) else inside,
    )


def _replacement(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    # Ray pickles an actor's class and its methods by value, and the functions that they use by
    # name.
    if inspect.iscoroutinefunction(function):

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await wrapper(function, *args, **kwargs)

        return functools.wraps(function)(awaited)

    def called(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return functools.wraps(function)(called)


def _named_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the arguments that can be given by position and by name."""
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


@dataclass(eq=False, kw_only=True)
class Hook:
    """One change of a framework's module, for one purpose.

    Attributes:
        module: The framework's module.
        put_in: The function that changes the module, as ``module:function`` of
            ``integrations.verl``, e.g. ``trainer:hook_timers``.
        records: The data that the hook records, e.g. ``tool calls of trajectories``, for messages.
        needed: Whether nothing at all is recorded without this hook.
        part: The part of verl with the module, e.g. ``v1`` or ``megatron``; runs without this part
            ignore the hook.
        missing: Functions that the module does not have, or with other arguments; ``None`` until
            the module is imported.
    """

    module: str
    put_in: str
    records: str
    needed: bool = False
    part: str = ""
    missing: list[str] | None = None

    def await_module(self) -> None:
        """Apply the hook as soon as the module is imported in this process."""
        _awaiting.append(self)
        register_post_import_hook(self._apply, self.module)

    @property
    def problem(self) -> str | None:
        """Reason why the installed framework cannot be hooked; ``None`` if no problem is known."""
        if self.missing:
            return f"{self.module} has no {', '.join(self.missing)}"
        if self.missing is None and not _exists(self.module):
            return f"there is no {self.module}"
        return None

    @property
    def misfit(self) -> str | None:
        """A sentence on the data that is not recorded, and why; ``None`` if the hook fits."""
        problem = self.problem
        return None if problem is None else f"not recorded: {self.records}, because {problem}"

    def _apply(self, module: ModuleType) -> None:
        """Apply the hook; errors are stored,
        because this package must not make a framework fail.
        """
        place, _, function = self.put_in.partition(":")
        missing: list[str] = []
        try:
            put_in = getattr(import_module(f"{__package__}.verl.{place}"), function)
        except Exception as error:
            warn_of_broken_package(error)
            missing.append(f"hook ({type(error).__name__}: {error})")
        else:
            with noting(missing):
                _tried(put_in, module)
        self.missing = list(dict.fromkeys(missing))


_awaiting: list[Hook] = []


def _tried(put_in: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Change a module, and report what it lacks instead of raising."""
    try:
        put_in(module)
    except AttributeError as error:
        missing(module, error.name or str(error))
    except Exception as error:
        missing(module, f"fitting API ({type(error).__name__}: {error})")


def misfits(parts: Container[str] | None = None) -> list[str]:
    """Return sentences on the data that no hook of this process records, with the reasons.

    Args:
        parts: The parts of verl that the run uses, e.g. ``v1``; ``None``: all.
    """
    used = [hook for hook in _awaiting if parts is None or hook.part in parts]
    return list(dict.fromkeys(hook.misfit for hook in used if hook.misfit is not None))


def usable(parts: Container[str]) -> bool:
    """Return whether all needed hooks of a run fit, as far as known in this process."""
    return all(hook.problem is None for hook in _awaiting if hook.needed and hook.part in parts)


def _exists(module: str) -> bool:
    """Return whether a module exists, without importing its package."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or not rest:
        return spec is not None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    return any(
        place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places
    )
