"""What becomes of a hook in a framework that is not as expected,
with a framework of a few files.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import verl_profiling.integrations.verl  # noqa: F401  its own hooks wait before those of the tests
from verl_profiling.integrations import hooks
from verl_profiling.integrations.hooks import Hook, misfits, noting, usable, wrap
from verl_profiling.integrations.verl.trainer import hook_v1_rollout

AS_EXPECTED = """
class RewardLoopWorker:
    async def compute_score(self, data):
        return data
"""
RENAMED_METHOD = AS_EXPECTED.replace("compute_score", "score")
OTHER_ARGUMENTS = AS_EXPECTED.replace("(self, data)", "(self, prompts, data)")
RENAMED_CLASS = AS_EXPECTED.replace("RewardLoopWorker", "Scorer")

Framework = Callable[[str], Hook]


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    """Return a function that imports a framework with such a module,
    and returns the hook for it.
    """
    monkeypatch.setattr(hooks, "_awaiting", [])
    monkeypatch.syspath_prepend(tmp_path)

    def imported(source: str, **fields: Any) -> Hook:
        (tmp_path / "framework").mkdir()
        (tmp_path / "framework/__init__.py").touch()
        (tmp_path / "framework/rewards.py").write_text(source)
        hook = Hook(
            module="framework.rewards",
            put_in="trajectories:hook_reward_loops",
            records="scoring",
            **fields,
        )
        hook.await_module()
        importlib.import_module("framework.rewards")
        return hook

    yield imported
    for name in ("framework", "framework.rewards"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (RENAMED_METHOD, "RewardLoopWorker.compute_score"),
        (OTHER_ARGUMENTS, "RewardLoopWorker.compute_score(self, data)"),
        (RENAMED_CLASS, "RewardLoopWorker"),
    ],
)
def test_what_does_not_fit_is_named_with_what_depends_on_it(
    framework: Framework, source: str, named: str
) -> None:
    """The framework is imported all the same, and what is not as expected is left as it is."""
    hook = framework(source)
    assert misfits() == [f"not recorded: scoring, because framework.rewards has no {named}"]
    assert hook.missing == [named]
    found = vars(sys.modules["framework.rewards"])
    classes = [value for value in found.values() if isinstance(value, type)]
    assert not any(hasattr(member, "__wrapped__") for c in classes for member in vars(c).values())


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits in silence for a module that this version does not have."""
    monkeypatch.setattr(hooks, "_awaiting", [])
    Hook(module="email.telegrams", put_in="any:hook", records="telegrams").await_module()
    Hook(module="email.message", put_in="any:hook", records="messages").missing = None
    assert misfits() == ["not recorded: telegrams, because there is no email.telegrams"]


def test_only_what_all_else_depends_on_switches_profiling_off(framework: Framework) -> None:
    """A run is recorded without what it can do without, and without what it does not use."""
    hook = framework(RENAMED_METHOD, part="rewards")
    assert usable({"rewards"})
    hook.needed = True
    assert not usable({"rewards"})
    assert usable({"other"})
    assert misfits({"other"}) == []


def test_more_arguments_than_the_hook_reads_fit() -> None:
    """New arguments behind the known ones, with defaults or not, change nothing."""

    class Owner:
        def method(self, first: int, second: int = 2, *, third: int = 3) -> int:
            return first + second + third

    def wrapper(
        function: Callable[..., int], self: Owner, first: int, *args: Any, **kwargs: Any
    ) -> int:
        return function(self, first, *args, **kwargs)

    missing: list[str] = []
    with noting(missing):
        wrap(Owner, "method", wrapper)
    assert missing == []
    assert Owner().method(1, 1, third=1) == 3


def test_the_plugin_imports_nothing_of_verl() -> None:
    """The plugin is loaded while verl is being imported, so it must not import any of it."""
    program = "import sys, verl_profiling.integrations.verl; sys.exit('verl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_trainer_without_a_part_of_the_start_has_no_misfit_for_it() -> None:
    """Its rollouts are marked as those of any other; the part is not there to be marked."""

    class PPOTrainer:
        def _add_batch_to_generate(self) -> None: ...

        def _next_train_batch(self) -> None: ...

        def _load_checkpoint(self) -> None: ...

    unmarked = PPOTrainer._load_checkpoint
    notes: list[str] = []
    with noting(notes):
        hook_v1_rollout(SimpleNamespace(PPOTrainer=PPOTrainer))
    assert notes == []
    assert PPOTrainer._load_checkpoint is not unmarked
