"""Builds typed settings from plain values; errors name the dotted key of the wrong value."""

from __future__ import annotations

import dataclasses
import re
import threading
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NewType, TypeVar

import msgspec

from verl_profiling.errors import ConfigError, choices_hint

__all__ = ["Size", "build", "check_seconds", "field_types", "value_of"]

T = TypeVar("T")
Size = NewType("Size", int)
"""A number of bytes, which may be written with a unit: ``"2GB"``, ``"512 MiB"``."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _plain(config: Any, key: str) -> Any:
    """Return an OmegaConf container as plain values; anything else as it is."""
    if type(config).__module__.partition(".")[0] != "omegaconf":
        return config
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(key, str(error).partition("\n")[0]) from error


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def build(cls: type[T], values: Any, key: str) -> T:
    """Build a dataclass from a mapping or a ``DictConfig``.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; ``key`` is the prefix of its name.
    """
    values = _plain(values, key)
    if not isinstance(values, Mapping):
        raise ConfigError(key, f"must be a mapping, is {type(values).__name__}")
    prefix = f"{key}." if key else ""
    hints = field_types(typing.cast("Any", cls))
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(
                f"{prefix}{name}", f"unknown key; {choices_hint(name, hints) if hints else 'it has none'}"
            )
        arguments[name] = value_of(hints[name], value, f"{prefix}{name}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error.key}", error.problem) from None


def value_of(kind: Any, value: Any, key: str) -> Any:
    """Return ``value`` as the type that a field is annotated with.

    Raises:
        ConfigError: The value has another type.
    """
    value = _plain(value, key)
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = typing.get_args(kind) if union else (kind,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            if isinstance(value, option):
                value = {name: getattr(value, name) for name in field_types(option)}
            return build(option, value, key)
        if option is Size and isinstance(value, str):
            return _size(value, key)
        if typing.get_origin(option) is dict and isinstance(value, Mapping):
            item = typing.get_args(option)[1]
            return {str(name): value_of(item, entry, f"{key}.{name}") for name, entry in value.items()}
    if Size in options:
        kind = int | None if type(None) in options else int
    try:
        return msgspec.convert(_numbers(value), kind)
    except msgspec.ValidationError as error:
        if isinstance(value, str) and str not in options and any(_is_list(option) for option in options):
            raise ConfigError(key, f"{error}; write a list: [{value}]") from None
        raise ConfigError(key, f"{error}{_choices(options)}") from None


def _numbers(value: Any) -> Any:
    """Return NumPy's numbers and arrays, and ranges, as plain values; anything else as it is."""
    if isinstance(value, list | tuple | range):
        return [_numbers(item) for item in value]
    return value.tolist() if type(value).__module__ == "numpy" else value


def _size(text: str, key: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(key, f"{text!r} is not a size; write a number of bytes, or e.g. 2GB or 512MiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])


def _is_list(option: Any) -> bool:
    return typing.get_origin(option) in (tuple, list)


def _choices(options: tuple[Any, ...]) -> str:
    for option in options:
        inner = [option, *typing.get_args(option)]
        for literal in inner:
            if typing.get_origin(literal) is Literal:
                return f"; choose from: {', '.join(map(str, typing.get_args(literal)))}"
    return ""


def check_seconds(key: str, value: float) -> None:
    """Check that one can wait for so long.

    Raises:
        ConfigError: It is not greater than 0, or longer than a wait can be; ``inf`` is.
    """
    if not 0 < value <= threading.TIMEOUT_MAX:
        bound = "greater than 0" if not value > 0 else f"at most {threading.TIMEOUT_MAX:.0f}"
        raise ConfigError(key, f"must be {bound}, is {value}")
