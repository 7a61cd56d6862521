"""Why a run did not end well: who went first, in which step and stage, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from verl_profiling.analysis import open_run
from verl_profiling.cli import main

LOOP = Path(__file__).with_name("dying_loop.py")


def said(run: Path) -> list[str]:
    """Return what ``check`` says of the processes of a run."""
    return [one.reason for one in open_run(run).check().artifacts if one.path == "processes"]


def run_loop(folder: Path, way: str) -> int:
    return subprocess.run([sys.executable, LOOP, folder, way], stderr=subprocess.DEVNULL).returncode


def test_the_rank_that_raised_first_is_named_and_not_the_loop_that_lost_it(tmp_path: Path) -> None:
    """With the line of its code and the last line of its traceback. The second start goes well:
    both are attempts of one run on its page.
    """
    assert run_loop(tmp_path, "raise") != 0
    line = next(n for n, text in enumerate(LOOP.read_text().splitlines(), 1) if "raise Val" in text)
    assert said(tmp_path) == [
        f"actor_rank1 went first in step 4, update_actor, at {LOOP}:{line} in work: exception: "
        "ValueError: no reward"
    ]
    assert run_loop(tmp_path, "handled") == 0
    assert said(tmp_path / "run_2") == []
    assert main(["report", str(tmp_path / "run_2"), "--save"]) == 0
    page = (tmp_path / "run_2" / "index.html").read_text()
    assert 'id="attempts"' in page
    assert "actor_rank1 went first in step 4" in page
    assert "training ended after step 4" in page


def test_a_process_that_is_killed_is_named_by_those_that_saw_it_die(tmp_path: Path) -> None:
    """It has left nothing; its parent may know the signal, if it looked before its own end."""
    assert run_loop(tmp_path, "kill") != 0
    [sentence] = said(tmp_path)
    assert sentence.startswith("actor_rank1 went first in step 4, update_actor: signal: ")
    assert main(["check", str(tmp_path)]) == 1
