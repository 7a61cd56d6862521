"""What is said of a run of verl that cannot be recorded, or not all of it; without verl."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from verl_profiling import ProfilingConfig, ToolUnavailableError
from verl_profiling.integrations import hooks
from verl_profiling.integrations.hooks import Hook
from verl_profiling.integrations.verl import profiler as profilers
from verl_profiling.integrations.verl.profiler import (
    active_profiler,
    can_be_profiled,
    log_values,
    notes_on,
)
from verl_profiling.integrations.verl.trainer import (
    TrainerProfiler,
    hook_weight_sync,
    say_no_trainer_is_hooked,
)

CONFIG: dict[str, Any] = {}
LOST = "not recorded: requests, because verl.clients has no Client.generate"


def hook(missing: list[str], *, needed: bool) -> Hook:
    """Return a hook that has met its module."""
    return Hook(
        module="verl.clients",
        put_in="any:hook",
        records="requests",
        needed=needed,
        missing=list(missing),
    )


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as a new process that runs an unknown verl."""
    monkeypatch.setattr(profilers, "untested", lambda: "verl 9.9 was not tested")
    monkeypatch.setattr(hooks, "_awaiting", [])


def settings(**given: Any) -> ProfilingConfig:
    return ProfilingConfig.from_any({"enable": True, **given})


@pytest.mark.parametrize("needed", [True, False])
def test_what_all_else_depends_on_switches_profiling_off(
    needed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One error names the version and the hook, and training goes on;
    of others nothing is said yet.
    """
    hooks._awaiting.append(hook(["Client.generate"], needed=needed))
    assert can_be_profiled(CONFIG, settings()) is not needed
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == len(caplog.records) == needed
    assert all("training goes on: verl 9.9 was not tested; " + LOST in error for error in errors)


@pytest.mark.parametrize("needed", [True, False])
def test_strict_settings_raise_for_what_does_not_fit(needed: bool) -> None:
    """The error names the version and what is not recorded;
    an unknown version alone is no error.
    """
    assert can_be_profiled(CONFIG, settings(strict=True))
    hooks._awaiting.append(hook(["Client.generate"], needed=needed))
    with pytest.raises(ToolUnavailableError, match=r"strict is true.*verl 9\.9.*requests"):
        can_be_profiled(CONFIG, settings(strict=True))


def test_one_warning_names_what_all_processes_said(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that say the same are one sentence, which every manifest gets too."""
    assert notes_on([LOST, LOST, "other"], strict=False) == [
        "verl 9.9 was not tested",
        LOST,
        "other",
    ]
    (record,) = caplog.records
    assert record.getMessage() == f"profiling: verl 9.9 was not tested; {LOST}; other"
    with pytest.raises(ToolUnavailableError, match="requests"):
        notes_on([LOST], strict=True)


@pytest.mark.parametrize("asked", [{"enable": True}, "verl", {"enable": True, "strict": True}])
def test_a_trainer_that_no_hook_reaches_says_that_it_is_not_profiled(
    asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if "strict" in asked:
        with pytest.raises(ToolUnavailableError, match="not profiled"):
            say_no_trainer_is_hooked({"profiling": asked})
        return
    say_no_trainer_is_hooked({"profiling": asked})
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "ProfilingTrainerMixin" in record.getMessage()


@pytest.mark.parametrize(
    "config", [None, {}, {"profiling": None}, {"profiling": {"enable": False}}, "text"]
)
def test_a_run_that_asks_for_nothing_hears_nothing(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    say_no_trainer_is_hooked(config)
    assert caplog.records == []


LOGGING = """
import logging
from verl_profiling.integrations.verl.profiler import let_lines_through

for _ in range(2):
    let_lines_through()
logger = logging.getLogger("verl_profiling.any")
for level in ("debug", "info", "warning", "error"):
    getattr(logger, level)(f"an {level} line")
"""
VERLS = "import logging; logging.basicConfig(level=logging.WARNING)"
VLLMS = (
    f"{VERLS}; logging.root.setLevel(logging.ERROR); "
    "logging.root.handlers[0].setLevel(logging.ERROR)"
)
OWN = f"{VERLS}; logging.getLogger('verl_profiling').setLevel(logging.WARNING)"


@pytest.mark.parametrize(
    ("configured", "heard"),
    [
        ("", ["info", "warning", "error"]),
        (VERLS, ["info", "warning", "error"]),
        (VLLMS, ["info", "warning", "error"]),
        (OWN, ["warning", "error"]),
    ],
)
def test_lines_are_heard_once_where_others_have_silenced_them(
    configured: str, heard: list[str], run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The levels of verl and of vLLM's server drop them;
    an application's own level for them is kept.
    """
    said = run_python(f"{configured}\n{LOGGING}").stderr
    found = {
        level: said.count(f"an {level} line") for level in ("debug", "info", "warning", "error")
    }
    assert found == {level: int(level in heard) for level in found}


def test_a_tracker_that_fails_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried again at the next step, and the others get each."""
    logged: list[int] = []

    def log(data: Any, step: int) -> None:
        logged.append(step)

    def fail(data: Any, step: int) -> None:
        logged.append(-step)
        raise OSError("no space left")

    trackers = {"own": SimpleNamespace(log=fail), "file": SimpleNamespace(log=log)}
    for step in (1, 2):
        log_values(trackers, {"a": 1.0}, step, step)
    assert logged == [-1, 1, -2, 2]
    (record,) = caplog.records
    assert record.getMessage() == "tracker own lacks step 1: OSError: no space left"


def test_a_replica_without_servers_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    manager = SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[])])
    trainer = SimpleNamespace(fit=lambda: None, config=CONFIG, llm_server_manager=manager)
    TrainerProfiler(trainer, settings()).begin(None)
    assert (
        "not recorded: the role rollout, because its servers do not fit (IndexError" in caplog.text
    )


@pytest.mark.parametrize("strict", [False, True])
def test_a_trainer_that_does_not_count_its_steps_goes_on(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first step says so, and no hook is called any more; strict settings raise."""
    trainer = SimpleNamespace(fit=lambda: None, config=CONFIG)
    profiler = TrainerProfiler(trainer, settings(strict=strict, schedule={"steps": [1]}))
    with profiler.activated():
        step, update = (profiler.timed(name, nullcontext()) for name in ("step", "update_weights"))
        if strict:
            with pytest.raises(ToolUnavailableError, match="no global_steps"):
                step.__enter__()
        else:
            with step, update:
                pass
            assert "training goes on: SimpleNamespace has no global_steps" in caplog.text
        assert active_profiler() is None


def test_a_weight_update_may_have_further_arguments() -> None:
    """E.g. of a fork of verl; a hook passes on what it does not know."""

    class Manager:
        async def update_weights(self, global_steps: int | None = None, mode: str = "") -> Any:
            return global_steps, mode

    hook_weight_sync(SimpleNamespace(CheckpointEngineManager=Manager))
    assert asyncio.run(Manager().update_weights(3, mode="delta")) == (3, "delta")
