"""A plugin that cannot be loaded, or not all of it: one visible line, and verl runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integrations.verl_runs import ROOT, search_path
from verl_profiling.integrations.verl.versions import TESTED

BREAK = """
import sys

class Breaking:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise {error}

sys.meta_path.insert(0, Breaking())
"""
LOADED_BY_VERL = """
import logging
from importlib.metadata import entry_points

logging.basicConfig(level=logging.WARNING)  # as verl does
[plugin] = entry_points(group="verl.plugins", name="verl_profiling")
plugin.load()
print("verl runs")
"""
RemovedModules = tuple[str, ...]


def lines_about(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "verl_profiling" in line]


@pytest.mark.parametrize("error", ["ImportError('no such package')", "RuntimeError('broken')"])
@pytest.mark.parametrize("module", ["wrapt", "verl_profiling.integrations.hooks"])
def test_a_plugin_that_cannot_be_imported_says_so_in_one_line(
    module: str, error: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """At level DEBUG verl says so itself; an exception would end a run that names the module."""
    run = run_python(BREAK.format(module=module, error=error) + LOADED_BY_VERL)
    assert run.stdout == "verl runs\n"
    [line] = lines_about(run.stderr)
    assert line.startswith("WARNING:")
    assert error.partition("(")[0] in line
    assert "verl runs on. Install what 'pip check' names, or verl_profiling again" in line


def test_a_whole_plugin_says_nothing(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    run = run_python(LOADED_BY_VERL)
    assert (run.stdout, lines_about(run.stderr)) == ("verl runs\n", [])


def run_verl(program: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports real verl, which loads the installed plugin."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("VERL_USE")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "PYTHONPATH": search_path(*folders, ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.verl
@pytest.mark.parametrize(
    "environment", [{}, {"VERL_USE_EXTERNAL_MODULES": "verl_profiling.integrations.verl"}]
)
@pytest.mark.parametrize(
    "module",
    ["wrapt", "verl_profiling.integrations.verl.trainer", "verl_profiling.controller.callback"],
)
def test_real_verl_imports_its_trainers_beside_a_broken_plugin(
    module: str, environment: dict[str, str]
) -> None:
    """Whichever module of ours fails, and however verl was told of the plugin."""
    program = BREAK.format(module=module, error="RuntimeError('broken')")
    program += "import verl.trainer.ppo.v1.trainer_base\nprint('verl runs')"
    run = run_verl(program, **environment)
    assert run.stdout.splitlines()[-1:] == ["verl runs"], run.stderr
    [line] = lines_about(run.stderr)
    assert "cannot be imported whole" in line
    assert "RuntimeError: broken" in line


def verl_without(folder: Path, modules: RemovedModules) -> Path:
    """Return the folder of a verl that is the installed one without some modules."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    hidden = shutil.ignore_patterns("__pycache__", *modules)
    shutil.copytree(Path(spec.origin).parent, folder / "verl", ignore=hidden)
    return folder


@pytest.mark.verl
@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (("trainer_base.py",), ""),  # V0 trainers are left
        (("trainer_base.py", "ray_trainer.py"), "there is no verl.trainer.ppo.ray_trainer"),
    ],
)
def test_a_verl_without_what_all_else_depends_on_is_named_at_its_import(
    modules: RemovedModules, says: str, tmp_path: Path
) -> None:
    """No hook would ever run there, and nothing else would tell."""
    run = run_verl("import verl; print('verl runs')", verl_without(tmp_path, modules))
    assert run.stdout.splitlines()[-1:] == ["verl runs"], run.stderr
    lines = lines_about(run.stderr)
    assert len(lines) == bool(says)
    for line in lines:
        assert says in line
        assert f"install verl {' or '.join(TESTED)}" in line


@pytest.mark.verl
def test_a_hook_that_raises_leaves_verl_as_it_is() -> None:
    """An exception of any kind is a part that is not recorded, and no exception of verl."""
    program = """
import verl_profiling.integrations.verl.trajectories as hooked
def hook_reward_loops(module):
    raise KeyError("renamed")
hooked.hook_reward_loops = hook_reward_loops
import verl.experimental.reward_loop.reward_loop
from verl_profiling.integrations.hooks import misfits
print(misfits())
"""
    run = run_verl(program)
    assert run.returncode == 0, run.stderr
    said = "reward_loop has no fitting API (KeyError: 'renamed')"
    assert f"not recorded: scoring (role reward), because verl.experimental.reward_loop.{said}" in (
        run.stdout
    )
