"""Hooks that wait for an import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiling.integrations.post_import import when_imported


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that can be imported, and has not been."""
    name = f"waited_for_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_hooks_are_called_after_the_import(module_name: str) -> None:
    """All hooks see the executed module, in order, and none is called before somebody imports it."""
    seen = []
    when_imported(module_name, lambda module: seen.append(("first", module.value)))
    when_imported(module_name, lambda module: seen.append(("second", module.value)))
    assert seen == []
    importlib.import_module(module_name)
    assert seen == [("first", 1), ("second", 1)]


def test_a_module_that_is_there_is_hooked_at_once(module_name: str) -> None:
    """A hook that comes too late to wait is called right away."""
    module = importlib.import_module(module_name)
    seen = []
    when_imported(module_name, seen.append)
    assert seen == [module]


def test_a_module_that_does_not_exist_still_does_not(module_name: str) -> None:
    """Waiting for a module does not change how a missing one fails."""
    when_imported(f"{module_name}_missing", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=f"{module_name}_missing"):
        importlib.import_module(f"{module_name}_missing")


def test_the_plugin_imports_nothing_of_verl() -> None:
    """The plugin is loaded while verl is being imported, so it must not import any of it."""
    program = "import sys, verl_profiling.integrations.verl; sys.exit('verl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
