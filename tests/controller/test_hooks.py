"""What runs after a capture: on whom, when, and what it cannot do to the run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import Pool
from fault_tools import FAULTY
from test_callback import following, pass_steps, train_through

from verl_profiling import ProfilingConfig
from verl_profiling.capture.session import Session

STEPS = range(1, 6)
NOTE = """if True:
    import os, sys
    values = (os.environ["VERL_PROFILING_" + word] if word.isupper() else word
              for word in sys.argv[2:])
    open(sys.argv[1], "a").write(" ".join(values) + chr(10))
"""


def settings(tmp_path: Path, **hooks: Any) -> ProfilingConfig:
    """Return settings that record steps 2 and 4."""
    return ProfilingConfig(
        enable=True,
        save_path=str(tmp_path / "run"),
        schedule={"steps": [2, 4]},
        tool="spans",
        after=hooks,
    )


def noting(tmp_path: Path, *words: str, **more: Any) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", NOTE, str(tmp_path / "notes"), *words], **more}


def slowly(hook: dict[str, Any]) -> dict[str, Any]:
    return {**hook, "command": ["sh", "-c", 'sleep 0.5 && exec "$@"', "sh", *hook["command"]]}


def notes(tmp_path: Path) -> list[str]:
    path = tmp_path / "notes"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_a_command_runs_after_each_capture_once_all_is_written(
    tmp_path: Path, session: Session
) -> None:
    """Told by environment variables, in the loop's process by default."""
    config = settings(tmp_path, note=noting(tmp_path, "STEP", "ROLE", "FOLDER", "x"))
    train_through(config, *STEPS)
    run = tmp_path / "run"
    assert notes(tmp_path) == [f"{step} controller {run}/step_00000{step} x" for step in (2, 4)]


def test_a_hook_of_the_last_capture_runs_once(tmp_path: Path, session: Session) -> None:
    """With the run's folder, and before training ends where the schedule says
    which capture is the last.
    """
    config = settings(tmp_path, note=noting(tmp_path, "STEP", "FOLDER", when="last"))
    callback = following(config)
    for step in STEPS:
        pass_steps(callback, step)
        assert step > 3 or notes(tmp_path) == []
    callback.on_train_end()
    callback.on_train_end()
    assert notes(tmp_path) == [f"4 {tmp_path / 'run'}"]


def test_hooks_run_one_after_another_in_order(tmp_path: Path, session: Session) -> None:
    """Also where the first takes longest: those of the captures,
    then what is due when training ends.
    """
    each = noting(tmp_path, "STEP")
    slower = 'test "$VERL_PROFILING_STEP" = 4 || sleep 0.5; "$@"'
    each["command"] = ["sh", "-c", slower, "sh", *each["command"]]
    config = settings(tmp_path, each=each, end=noting(tmp_path, "end", when="last"))
    config = ProfilingConfig.from_any({**config.to_dict(), "schedule": {"steps": [2, 3, 4, 9]}})
    train_through(config, *STEPS)
    assert (tmp_path / "notes").read_text().split() == ["2", "3", "4", "end"]


def test_workers_run_hooks_on_chosen_ranks(tmp_path: Path, pool: Pool) -> None:
    """Each in its own process, waited for; a rank that does not record runs it too
    where it is named.
    """
    base = settings(
        tmp_path,
        mine=noting(tmp_path, "mine", "ROLE", "RANK", "PID", roles=["actor"]),
        named=slowly(noting(tmp_path, "named", "RANK", roles=["actor"], ranks="1-2", when="last")),
        every=noting(tmp_path, "every", "RANK", roles=["actor"], ranks="all", when="last"),
    )
    config = ProfilingConfig.from_any({**base.to_dict(), "select": {"ranks": [0, 1]}})
    pids = ray.get(
        [worker.set_up.remote(config, rank=rank) for rank, worker in enumerate(pool.sync)]
    )
    with following(config, pool.sync) as callback:
        pass_steps(callback, *STEPS)
    mine = [f"mine actor {rank} {pids[rank]}" for rank in (0, 1)]
    assert notes(tmp_path) == sorted(
        [*mine, *mine, "named 1", "named 2", "every 0", "every 1", "every 2"]
    )


def test_a_hook_waits_for_what_is_finished_in_the_background(
    tmp_path: Path, session: Session
) -> None:
    """In the worker for its own artifacts, in the loop's process for all;
    the loop goes on meanwhile.
    """
    look, plan = {"command": ["sh", "-c", 'ls "$VERL_PROFILING_FOLDER"']}, tmp_path / "plan.json"
    plan.write_text('{"2/actor_rank0": "finishes late"}')
    given = settings(tmp_path, mine={**look, "roles": ["actor"]}, all=look).to_dict()
    config = ProfilingConfig.from_any(
        {**given, "tool": FAULTY, "tools": {FAULTY: {"plan": str(plan)}}}
    )
    logs = tmp_path / "run" / "after"
    with following(config) as callback:
        pass_steps(callback, 1, 2, 3)
        time.sleep(0.3)
        assert not logs.exists()
        plan.write_text("{}")
    for name in ("mine.actor_rank0", "all.controller_rank0"):
        assert "actor_rank0.faulty.json.gz" in (logs / f"step_000002.{name}.log").read_text()


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ({"command": [sys.executable, "-c", "raise SystemExit(3)"]}, "exited with 3"),
        ({"command": ["/no/such/program"]}, "could not be run"),
    ],
)
def test_a_hook_that_fails_is_said_and_hurts_nobody(
    tmp_path: Path,
    session: Session,
    hook: dict[str, Any],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even with strict settings; the log names the file with its output."""
    config = ProfilingConfig.from_any({**settings(tmp_path, bad=hook).to_dict(), "strict": True})
    train_through(config, *STEPS)
    assert f"after.bad (controller rank 0, step 2) {said}" in caplog.text


def test_a_hook_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """A child that ignores SIGTERM too; the loop has not waited meanwhile."""
    child = "trap '' TERM; echo $$ > pid.new; mv pid.new pid; while :; do sleep 1; done"
    command = ["sh", "-c", f'cd {tmp_path}; sh -c "$1" & wait', "sh", child]
    config = settings(tmp_path, hang={"command": command, "when": "last", "timeout_s": 3})
    train_through(config, *STEPS)
    assert "was ended after timeout_s=3" in caplog.text
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
