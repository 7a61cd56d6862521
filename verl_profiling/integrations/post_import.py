"""Calls a function when a module has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]

Hook = Callable[[ModuleType], None]


class _Watcher(MetaPathFinder):
    """Finds the awaited modules, and calls their hooks once they have been executed."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hooks = self.waiting.pop(fullname, None)
        if hooks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in hooks:
                hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = _Watcher()


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook`` with a module: now if it is imported already, otherwise right after its import.

    Several hooks of one module are called in the order in which they were given.

    Args:
        name: Full name of the module.
        hook: Function to call; an exception in it makes that import fail.
    """
    if name in sys.modules:
        hook(sys.modules[name])
        return
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.waiting.setdefault(name, []).append(hook)
