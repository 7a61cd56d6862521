"""The setting ``model``: sizes of the trained model, for the operations that its stages need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import ConfigError

_PASS = "pass the model's folder, or model.config.to_dict()"


def model_sizes(model: str | Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the plain values of a model's Hugging Face configuration.

    Args:
        model: The configuration, a ``config.json``, a folder with one, or the name of a model in
            the local cache of Hugging Face; nothing is downloaded.
        key: Key of the setting, for errors.

    Raises:
        ConfigError: There is no such configuration on this host.
    """
    if isinstance(model, str):
        file = _file_of(model)
        try:
            model = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(key, f"{file} cannot be read: {error}; {_PASS}") from None
    return {name: _plain(value) for name, value in model.items() if _plain(value) is not None}


def _file_of(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(model, "config.json")
        except Exception:  # the library is missing, or the name is no valid one
            cached = None
        if isinstance(cached, str):
            return Path(cached)
    return path / "config.json"


def _plain(value: object) -> object:
    """Return a number, a text, or a list of numbers; ``True`` for any other setting that is set."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return list(value)
    return True if value else None
