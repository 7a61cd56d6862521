"""The ``precision`` tool: its options anywhere, and captures with the real msprobe
where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.npu import artifacts_of
from verl_profiling import ToolUnavailableError
from verl_profiling.steps.check import check
from verl_profiling.steps.inputs import find_steps
from verl_profiling.workers import CaptureMixin

ROOT = Path(__file__).resolve().parents[2]
Outcome = dict[str, Any]


@pytest.mark.skipif(importlib.util.find_spec("msprobe") is not None, reason="msprobe is installed")
def test_without_msprobe_it_says_what_to_install() -> None:
    with pytest.raises(ToolUnavailableError, match="pip install mindstudio-probe"):
        CaptureMixin().init_capture({"enable": True, "tool": "precision"}, role="actor")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Return a function that runs a scenario in a process of its own, once,
    and returns what came out.
    """
    if importlib.util.find_spec("msprobe") is None:
        pytest.skip("msprobe is not installed; `make test-npu` builds an environment with it")
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}

    @cache
    def run(name: str) -> Outcome:
        folder = tmp_path_factory.mktemp(name)
        done = subprocess.run(
            [sys.executable, "-m", "tests.npu.precision_scenarios", name, str(folder)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found: Outcome = json.loads(done.stdout.splitlines()[-1])
        return {**found, "folder": folder}

    return run


LINEAR = ["Functional.linear.0.forward", "Functional.linear.0.backward"]


@pytest.mark.npu
@pytest.mark.timeout(300)
class TestRealMsprobe:
    """What the real msprobe does in our hands, on torch's CPU build."""

    def test_a_step_holds_what_torch_was_called_with(self, ran: Callable[[str], Outcome]) -> None:
        """In e2e mode each step has a folder of its own, with nothing of the steps before in it."""
        outcome = ran("calls")
        assert list(outcome["steps"]) == ["step_000002", "step_000004"]
        for step, dumps in (
            (2, outcome["steps"]["step_000002"]),
            (4, outcome["steps"]["step_000004"]),
        ):
            [(path, names)] = dumps.items()
            assert path == f"actor_rank3.precision/step{step}/rank3"
            assert sum("linear" in name and name.endswith("forward") for name in names) == step
            assert set(LINEAR) <= set(names)
        run = outcome["folder"] / "run"
        result = check(run / "step_000002")
        assert result.ok, result.artifacts
        assert [source.lane for step in find_steps(run) for source in step.sources] == [], (
            "no trace: no lane"
        )

    def test_a_stage_that_raises(self, ran: Callable[[str], Outcome]) -> None:
        """The user's exception passes, its stage is kept as failed,
        the next stage's dump is whole.
        """
        outcome = ran("calls")["raises"]
        assert "mat1 and mat2 shapes cannot be multiplied" in outcome["raised"]
        assert artifacts_of(outcome["result"]) == [
            ("actor_rank0.update_actor.precision", "ok"),
            ("actor_rank0.update_critic.precision", "ok"),
        ]
        assert [span["failed"] for span in outcome["result"]["stages"]] == [True, False]
        [_, critic] = outcome["entries"].values()
        assert [name for name in critic if "linear" in name] == LINEAR

    def test_what_cannot_be_recorded_is_said(self, ran: Callable[[str], Outcome]) -> None:
        """Folders, a full disk, a recording of nothing, other options."""
        outcome = ran("calls")
        assert "Not a directory" in outcome["unwritable"]
        assert outcome["unfit"].startswith("CaptureStateError: actor_rank0: msprobe did not start")
        assert "only writes to paths of letters" in outcome["unfit"]
        assert outcome["off_after_a_failure"]
        [artifact] = outcome["full"]["artifacts"]
        assert artifact["status"] == "failed"
        assert "dump.json failed" in artifact["reason"]
        assert outcome["idle"]["status"] == "empty"
        [artifact] = ran("calls")["idle"]["artifacts"]
        assert artifact["status"] == "empty"
        assert "no recorded function ran" in artifact["reason"]
        assert outcome["restored"]
        assert not outcome["open"]
        assert "cannot be created again" in ran("calls")["other_options"]

    def test_a_debugger_of_the_application_is_left_alone(
        self, ran: Callable[[str], Outcome]
    ) -> None:
        """The capture fails, and the application's debugger records as it would have."""
        outcome = ran("own_debugger")
        assert "has a PrecisionDebugger of its own" in outcome["message"]
        assert set(LINEAR) <= set(outcome["own"])

    def test_modules_structure_and_tensors(self, ran: Callable[[str], Outcome]) -> None:
        """Of the model that was named; the structure holds no values."""
        outcome = ran("modules")
        assert "watch_model(model)" in outcome["unknown"]
        assert {"Module.0.Linear.forward.0", "Module.1.ReLU.backward.0", *LINEAR} <= set(
            outcome["entries"]
        )
        outcome = ran("structure")
        assert list(outcome["modules"]) == [
            "Module.0.Linear.forward.0",
            "Module.0.Linear.backward.0",
        ]
        assert (outcome["result"]["status"], outcome["idle"]["status"]) == ("ok", "empty")
        outcome = ran("tensors")
        assert outcome["entries"] == LINEAR
        assert outcome["values"]["Functional.linear.0.forward.input.0.pt"] == [2, 4]
        assert outcome["result"]["artifacts"][0]["bytes"] > 0
