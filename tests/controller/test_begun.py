"""A capture that begins is on disk when it begins,
so that its folder explains itself whatever happens.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import RunPython
from test_callback import configured, following, manifest

from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest

KILLED = """
    import os, signal
    from fleet import TrainWorker
    from verl_profiling import ProfilingCallback
    config = {"enable": True, "tool": "spans", "save_path": "run", "schedule": {"steps": [1, 2, 9]}}
    worker = TrainWorker()
    worker.set_up(config)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", worker)
    for step in (1, 2):
        profiling.on_step_begin(step)
        worker.work()
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        profiling.on_step_end()
"""


WRITES = """
    import os, sys
    from pathlib import Path
    from fleet import TrainWorker
    from verl_profiling import ProfilingCallback

    seen = []

    def place(path, folder):
        parent = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""
        return Path(parent, str(path)).absolute()

    def note(event, arguments):
        if event == "os.rename":
            seen.append(f"to {place(arguments[1], arguments[3])}")
        elif event == "os.mkdir":
            seen.append(f"in {place(arguments[0], arguments[2])}")
        elif event == "open" and arguments[2] & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY
        ):
            # else it is a descriptor, or a name in an opened folder
            if os.sep in str(arguments[0]):
                seen.append(f"in {place(arguments[0], -1)}")

    config = {
        "enable": True, "tool": ["torch", "spans"], "mode": sys.argv[1], "save_path": "run/of/mine",
        "schedule": {"steps": [1]}, "watch": {"enable": True, "sinks": ["tensorboard"]},
    }
    worker = TrainWorker()
    worker.set_up(config)
    sys.addaudithook(note)
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", worker)
        for step in (1, 2):
            profiling.on_step_begin(step)
            worker.work()
            profiling.on_step_end({"loss": 1.0})
    print(*seen, sep="\\n")
"""


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_a_captured_step_writes_its_manifest_twice_and_nothing_outside_of_the_run(
    tmp_path: Path, run_python: RunPython, mode: str
) -> None:
    """Whatever opens a file, makes a folder or renames something, is seen by an audit hook.

    The callback tries once whether the run's folder could be made, with an empty folder that goes
    at once.
    """
    lines = [line.split(" ", 1) for line in run_python(WRITES, mode).stdout.splitlines()]
    run = tmp_path / "run"
    assert lines.count(["to", str(run / "of" / "mine" / "step_000001" / "manifest.json")]) == 2
    outside = {path for _, path in lines if not Path(path).is_relative_to(run)}
    tried = {path for path in outside if re.fullmatch(r"\.[0-9a-f]{32}", Path(path).name)}
    assert len(tried) == 1
    assert outside - tried <= {os.devnull}
    assert [*tmp_path.iterdir()] == [run]


def test_a_killed_loop_leaves_a_step_that_every_command_names(
    tmp_path: Path, run_python: RunPython, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step before is whole; the one that was open is said, and the exit code is 1."""
    run_python(KILLED, status=-9)
    folder = tmp_path / "run"
    assert [read_manifest(step).state for step in sorted(folder.glob("step_*"))] == [
        "written",
        "begun",
    ]
    for command in ("check", "report", "merge"):
        assert main([command, str(folder)]) == 1, command
        printed = "".join(capsys.readouterr())
        assert "killed: the capture began" in printed, command
        assert "step_000002" in printed, command
        assert command != "check" or re.search(
            "step 9 of schedule.steps has no folder.* is gone", printed
        )
    assert main(["check", str(folder / "step_000002")]) == 1


def test_a_step_that_is_being_recorded_is_not_called_lost(
    tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """While its process runs, the step has begun and not ended."""
    config = configured(tmp_path, tool="torch")
    callback = following(config)
    callback.on_step_begin(2)
    folder = Path(config.save_path) / "step_000002"
    [promised] = manifest(config).workers[0].artifacts
    assert (promised.path, promised.status) == ("actor_rank0.torch.json.gz", "missing")
    assert main(["check", str(folder)]) == 1
    assert f"by pid {os.getpid()} on" in (printed := capsys.readouterr().out)
    assert "running: recorded since" in printed
    assert main(["report", str(folder)]) == 1
    assert "around the step" not in capsys.readouterr().out, "a share of a step without a length"
    callback.on_step_end()
    callback.on_train_end()
    assert main(["check", str(folder)]) == 0


def test_a_capture_of_several_steps_says_which_have_begun(tmp_path: Path, session: Session) -> None:
    """So that what a killed run leaves of them is told apart, too."""
    config = configured(tmp_path, schedule={"steps": [2, 3], "continuous": True})
    callback = following(config)
    callback.on_step_begin(2)
    callback.on_step_end()
    callback.on_step_begin(3)
    found = manifest(config)
    assert found.state == "begun"
    assert [span.step for span in found.step_spans] == [2, 3]
    callback.on_step_end()
