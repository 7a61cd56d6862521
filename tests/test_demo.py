"""``verl-profiling demo``, the first command that a newcomer types."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_profiling.cli import EXIT_BAD_INPUT

pytest.importorskip("torch", reason="torch is not installed; `make env` builds an environment")

ANSWERS_WITHIN_S = 90.0  # on two cores, from the command


def demo(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, where each page that it opens is noted in ``opened``."""
    environment = {**os.environ, "BROWSER": "sh -c 'echo $0 >> opened' %s", **variables}
    for name in {"DISPLAY", "WAYLAND_DISPLAY"} - set(variables):
        environment.pop(name, None)
    command = [sys.executable, "-m", "verl_profiling.cli", "demo", *options]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_it_trains_and_shows_where_the_time_went(tmp_path: Path) -> None:
    """The policy learns; the first screen says what would help; nothing opens without a display.
    A second run keeps the first, and opens its page on a display.
    """
    begin = time.monotonic()
    done = demo(tmp_path)
    assert time.monotonic() - begin < ANSWERS_WITHIN_S
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"step +\d+  reward (\S+)", done.stderr)]
    assert len(rewards) == 24
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9
    assert "step 20, policy version 19\n" in done.stdout
    assert re.search(r"^What would help +$", done.stdout, re.MULTILINE)
    assert "24 steps logged, 1 to 24" in done.stdout
    assert re.search(
        "^start-up: .* init_capture of controller; ((?!unknown).)*$", done.stdout, re.M
    )
    step = tmp_path / "outputs/grpo_demo/step_000020"
    assert f"wrote {step}/report.html\n" in done.stderr
    assert f"verl-profiling view {step}\n" in done.stderr
    assert not (tmp_path / "opened").exists()

    again = demo(tmp_path, "--json", DISPLAY=":0")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    stages = {"rollout", "reward", "old_log_prob", "advantage", "update_actor", "update_weights"}
    assert {stage["name"] for stage in report["stages"]} >= stages
    assert report["throughput"]["tokens"] > 256
    opened = (tmp_path / "opened").read_text()
    assert opened == f"file://{step.parent}/run_2/step_000020/report.html\n"


def test_without_torch_one_line_says_what_to_install(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(
        """
        import sys
        sys.modules["torch"] = None
        from verl_profiling.cli import main
        sys.exit(main(["demo"]))
        """,
        status=EXIT_BAD_INPUT,
    )
    assert done.stdout == ""
    assert re.fullmatch(r"verl-profiling: error: .* pip install torch\n", done.stderr)
