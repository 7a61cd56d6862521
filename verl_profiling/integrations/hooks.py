"""A place where this package puts code into another one: what depends on it, and whether it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_profiling.integrations.post_import import when_imported
from verl_profiling.integrations.wrapping import noting

__all__ = ["Hook", "misfits", "usable"]

logger = logging.getLogger(__name__)


def _always(config: Any) -> bool:
    return True


@dataclass(eq=False, kw_only=True)
class Hook:
    """What is put into one module of a framework, for one purpose.

    Attributes:
        module: The framework's module.
        put_in: Function of this package that is called with it, as ``module:function``.
        records: What is recorded by it, as a user knows it.
        needed: Whether without it nothing is recorded.
        used_by: Whether a run with this configuration comes here at all.
        missing: What the module does not have, or has in another form; ``None`` until it is imported.
    """

    module: str
    put_in: str
    records: str
    needed: bool = False
    used_by: Callable[[Any], bool] = _always
    missing: list[str] | None = None

    def await_module(self) -> None:
        """Put it in as soon as the module is imported in this process."""
        _awaiting.append(self)
        when_imported(self.module, self._apply)

    @property
    def name(self) -> str:
        """What it is called: its function's name without the verb."""
        return self.put_in.partition(":")[2].partition("_")[2]

    @property
    def problem(self) -> str | None:
        """Why it does not fit; ``None`` as long as nothing speaks against it."""
        if self.missing:
            return f"{self.module} has no {', '.join(self.missing)}"
        if self.missing is None and not _exists(self.module):
            return f"there is no {self.module}"
        return None

    @property
    def misfit(self) -> str | None:
        """What is not recorded, and why; ``None`` as long as nothing speaks against it."""
        problem = self.problem
        return None if problem is None else f"not recorded: {self.records}, because {problem}"

    def _apply(self, module: ModuleType) -> None:
        """Put it in. A framework must not fail because this package is installed, so errors are kept."""
        place, _, function = self.put_in.partition(":")
        missing: list[str] = []
        with noting(missing):
            try:
                getattr(import_module(f"{__package__}.{place}"), function)(module)
            except AttributeError as error:
                missing.append(error.name or str(error))
            except (ImportError, TypeError, ValueError) as error:
                missing.append(str(error))
        self.missing = list(dict.fromkeys(missing))
        if missing:
            logger.debug("%s", self.misfit)


_awaiting: list[Hook] = []


def misfits(config: Any = None) -> list[str]:
    """Return what is not recorded in this process, each with the reason.

    Args:
        config: The framework's configuration, to leave out what such a run does not use anyway.
    """
    used = [hook for hook in _awaiting if config is None or hook.used_by(config)]
    return list(dict.fromkeys(hook.misfit for hook in used if hook.misfit is not None))


def usable(config: Any) -> bool:
    """Return whether a run with this configuration is recorded at all, as far as this process knows."""
    needed = [hook for hook in _awaiting if hook.needed and hook.used_by(config)]
    return all(hook.problem is None for hook in needed)


def _exists(module: str) -> bool:
    """Return whether there is such a module, without importing its package."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or not rest:
        return spec is not None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)
