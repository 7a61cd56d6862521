"""Finds the class of a tool by its name in the settings; only this module imports tools by name."""

from __future__ import annotations

from importlib import import_module

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.tools import TOOLS, Tool

__all__ = ["load_tool"]


def load_tool(name: str, key: str = "tool") -> type[Tool]:
    """Return the class of a tool.

    Args:
        name: A name from :data:`verl_profiling.tools.TOOLS`, or ``"package.module:Class"`` for a tool
            of your own.
        key: Configuration key to name in an error.

    Raises:
        ConfigError: There is no such tool.
    """
    location = TOOLS.get(name, name)
    module_name, separator, class_name = location.partition(":")
    if not separator:
        raise ConfigError(
            key, f"unknown tool {name!r}; {choices_hint(name, TOOLS)}, or 'package.module:Class'"
        )
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(key, f"tool {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise ConfigError(key, f"{name!r} is not a subclass of verl_profiling.tools.Tool")
    return found
