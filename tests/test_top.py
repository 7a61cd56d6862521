"""``verl-profiling top``: a running job in a terminal."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path

import msgspec
import pytest
from conftest import RunPython
from drawn_summaries import MS, summary
from rich.console import Console, RenderableType
from step_folders import build_step, rewrite

from verl_profiling.capture_request import Trigger
from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_FINDING, EXIT_OK, main
from verl_profiling.commands.top import LiveRun
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.step_summary import Hang, SpanTotal, StepSummary
from verl_profiling.files.watch_log import WATCH_LOG
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.report.watch_frame import RunView, captures_so_far, logged_steps, watch_frame
from verl_profiling.steps.check import check
from verl_profiling.watch.log_writer import WatchLog

ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
# A shell that runs the tests in the background has them ignore Ctrl-C, and so would their children.
_MAIN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
CLI = (
    sys.executable,
    "-c",
    f"{_MAIN}\nfrom verl_profiling.cli import main\nsys.exit(main(sys.argv[1:]))",
)


def write_run(
    run: Path,
    *,
    process: ProcessId | None = None,
    end_ns: int | None = None,
    enable: bool = True,
    run_id: str = "abc",
    trigger: Mapping[str, float | None] | None = None,
) -> None:
    """Write ``run.json``; the process that runs the loop is by default this one."""
    run.mkdir(exist_ok=True)
    info = RunInfo(
        run_id=run_id,
        begin_ns=1,
        process=process or ProcessId.current(),
        config={"watch": {"enable": enable, "trigger": trigger}},
        versions={},
        end_ns=end_ns,
    )
    write_json_atomically(run / "run.json", info)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of this process with 30 steps, of which step 20 is slow and step 12 was captured."""
    folder = tmp_path / "run"
    write_run(folder)
    log = WatchLog(folder)
    for number in range(30):
        slow = {"rollout": 9000} if number == 20 else {}
        log(summary(number, {"rollout": 5000, "update_actor": 3000, **slow}))
    asked = Trigger(kind="anomaly", reason="rollout took 9.00 s, 1.8 times its median")
    rewrite(build_step(folder, step=12), trigger=asked)
    return folder


def drawn(frame: RenderableType, width: int = 100, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a frame in a terminal."""
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, color_system=None)
    console.print(frame)
    stream.seek(0)
    return stream.read().splitlines()


def frame_of(*steps: StepSummary) -> RenderableType:
    return watch_frame(RunView(run=Path("r"), state="lives", watch=steps))


class TestOneFrame:
    """``--once``, and what a frame holds."""

    def test_it_shows_the_step_its_stages_memory_and_captures(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Who leads, by how much, who asked for captures; no colours when piped,
        where it is one frame.
        """
        assert main(["top", str(run), "--once"]) == EXIT_OK
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        for text in (
            f"run: {ProcessId.current()}, last step logged ",
            "step 29: 8.50 s, median 8.50 s of 30 steps",
            "actor_rank2 +500 ms",
            "(in no stage)",
            "9 GB  3 GB  actor_rank3",
            "1 capture:",
            "step_000012: anomaly: rollout took 9.00 s, 1.8 times its median",
        ):
            assert text in printed
        (rollout,) = [line for line in printed.splitlines() if line.startswith("rollout")]
        assert rollout.split()[1:6] == ["5.00", "s", "58.8%", "5.00", "s"]
        assert rollout.count("▅") == 19
        assert rollout.count("█") == 1
        assert main(["top", str(run)]) == EXIT_OK
        assert "step 29" in capsys.readouterr().out

    def test_an_anomaly_that_waits_is_beside_the_captures(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        WatchLog(run)(msgspec.structs.replace(summary(30), waits="step 12 was captured"))
        assert main(["top", str(run), "--once"]) == EXIT_OK
        assert "1 capture; an anomaly waits: step 12 was captured\n" in capsys.readouterr().out

    def test_a_step_that_hangs_comes_first_until_it_goes_on(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Also if the summary of an earlier step, which waited for the same worker,
        comes after it.
        """
        log, hung = WatchLog(run), msgspec.structs.replace(summary(31), end_ns=0)
        reason = "is in tool:search of trajectory p7, sample 3 for 30.9 s"
        log(
            msgspec.structs.replace(
                hung, hang=Hang("rollout", 31.2, 3.1, "agent_loop_rank0", reason)
            )
        )
        log(summary(30))
        assert main(["top", str(run), "--once"]) == EXIT_FINDING
        printed = capsys.readouterr().out
        assert printed.startswith(
            "step 31 hangs: in rollout nothing has progressed for 31.2 s (usually 3.10 s)"
        )
        assert "\nstep 30: " in printed
        assert any("step 31 hangs" in entry.reason for entry in check(run).artifacts)
        write_run(run, end_ns=2)
        assert main(["top", str(run), "--once"]) == main(["check", str(run)]) == EXIT_FINDING
        (run / "run.json").unlink()
        assert main(["top", str(run), "--once"]) == main(["check", str(run)]) == EXIT_FINDING
        assert capsys.readouterr().out.count("step 31 hangs: ") == 4
        write_run(run)
        log(hung)
        assert main(["top", str(run), "--once"]) == EXIT_OK
        assert "hangs" not in capsys.readouterr().out
        assert not any("hangs" in entry.reason for entry in check(run).artifacts)

    def test_a_first_step_that_warms_up_flattens_no_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What is far beyond the other steps is marked; these have their heights."""
        write_run(tmp_path / "run")
        log = WatchLog(tmp_path / "run")
        for number in range(12):
            log(summary(number, {"rollout": {0: 57_000, 7: 8_000}.get(number, 4_000)}))
        assert main(["top", str(tmp_path / "run"), "--once"]) == EXIT_OK
        lines = capsys.readouterr().out.splitlines()
        assert "▲▅▅▅▅▅▅█▅▅▅▅" in lines
        (rollout,) = [line for line in lines if line.startswith("rollout")]
        assert "▲▅▅▅▅▅▅█▅▅▅▅" in rollout

    def test_of_several_runs_the_one_that_goes_on_is_shown_or_the_one_that_is_named(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """By its path; where none or several go on, they are listed."""
        older = run / "run_2"
        write_run(older, end_ns=5, run_id="older")
        WatchLog(older)(summary(1, {"rollout": 5000}))
        assert main(["top", str(run), "--once"]) == EXIT_OK
        assert "step 29" in capsys.readouterr().out
        assert main(["top", str(older), "--once"]) == EXIT_OK
        assert "run_2: training ended" in capsys.readouterr().out
        write_run(run / "run_3", run_id="newer")
        assert main(["top", str(run), "--once"]) == EXIT_BAD_INPUT
        [error] = capsys.readouterr().err.splitlines()
        assert error.endswith(
            f"choose one of them: {run / 'run.json'}, {run / 'run_3' / 'run.json'}"
        )
        (run / "run_2" / "run.json").write_text("{")
        assert main(["top", str(run / "run.json"), "--once"]) == EXIT_OK

    @pytest.mark.parametrize("width", [100, 300])
    def test_it_fits_the_terminal(self, width: int) -> None:
        long = summary(
            1, {"rollout": 5000, "a_stage_with_a_name_that_is_longer_than_most": 3}, leader="x" * 60
        )
        lines = drawn(frame_of(long), width)
        assert max(map(len, lines)) <= min(width, 100)
        assert any("rollout" in line for line in lines)
        assert any("5.00 s" in line for line in lines)

    def test_who_leads_is_shown_and_names_cannot_steer_the_terminal(self) -> None:
        """Nobody where none is clear."""
        lines = drawn(frame_of(summary(5)))
        assert any("actor_rank2 +500 ms" in line for line in lines)
        lines = drawn(frame_of(summary(5, leader="")))
        assert not any("actor_rank2 +" in line for line in lines)
        lines = drawn(frame_of(summary(1, {"\x1b[2J[red]": 10}, leader="\x07[/]")))
        assert any(r"\x1b[2J[red]" in line for line in lines)
        assert not any("\x1b" in line or "\x07" in line for line in lines)

    @pytest.mark.parametrize(("ratio", "window"), [(1.3, 20), (1.6, 10), (None, 20)])
    def test_a_stage_that_varies_has_the_ratio_that_is_noticed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], ratio: float | None, window: int
    ) -> None:
        """By the run's thresholds; a stage that is noticed from these on is left out,
        as is a past fault.
        """
        noise = random.Random(3)
        trigger = {"slow_stage": ratio, "window": window}
        write_run(tmp_path / "run", trigger=trigger)
        log = WatchLog(tmp_path / "run")
        for step in range(100):
            rollout = int(5000 * noise.lognormvariate(0, 0.25))
            log(
                summary(
                    step, {"rollout": rollout, "update_actor": 6000 if 30 < step < 50 else 3000}
                )
            )
        assert main(["top", str(tmp_path / "run"), "--once"]) == EXIT_OK
        lines = [line for line in capsys.readouterr().out.splitlines() if "within 8 steps" in line]
        if ratio is None:
            assert lines == []
            return
        assert re.fullmatch(
            r"varying stages: within 8 steps, detected only from rollout (1.9|2.\d) times .*",
            lines[0],
        )

    def test_what_trajectories_spent_is_shown(self) -> None:
        """By name: the sum, how many calls they were, how long one took, and how many failed."""
        usual = [
            SpanTotal("tool:search", 240, 4_000 * MS),
            SpanTotal("trajectory", 64, 90_000 * MS),
        ]
        slow = [
            SpanTotal("tool:search", 240, 12_300 * MS, 3),
            SpanTotal("trajectory", 64, 98_000 * MS),
        ]
        lines = drawn(
            frame_of(summary(1, spans=usual), summary(2, spans=usual), summary(3, spans=slow))
        )
        (search,) = [line for line in lines if line.startswith("tool:search")]
        assert search.split()[1:9] == ["12.3", "s", "240", "51.2", "ms", "3", "4.00", "s"]
        (whole,) = [line for line in lines if line.startswith("trajectory")]
        assert whole.split()[1:8] == ["98.0", "s", "64", "1.53", "s", "90.0", "s"]
        assert max(map(len, drawn(frame_of(summary(3, spans=slow)), 40))) <= 40
        many = [SpanTotal(f"tool:{number}", 1, number) for number in range(60)]
        assert any("and 52 more" in line for line in drawn(frame_of(summary(1, spans=many))))
        nobody = drawn(frame_of(summary(1)))
        assert not any(line.startswith("span") for line in nobody)


class TestExitCodes:
    """What a script learns."""

    def test_a_run_that_is_over_says_so(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One that has ended is well; a process that is gone is a finding."""
        write_run(run, end_ns=2)
        assert main(["top", str(run), "--once"]) == EXIT_OK
        shown = capsys.readouterr().out
        assert "run: training ended" in shown
        assert "last step logged" in shown
        gone = subprocess.Popen(["true"])
        gone.wait()
        write_run(run, process=msgspec.structs.replace(ProcessId.current(), pid=gone.pid))
        assert main(["top", str(run), "--once"]) == EXIT_FINDING
        assert f"pid {gone.pid} on" in capsys.readouterr().out

    def test_a_run_without_steps_says_what_to_do(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its watch has logged nothing yet, and is waited for; or it has none."""
        write_run(tmp_path / "run")
        assert main(["top", str(tmp_path / "run"), "--once"]) == EXIT_OK
        assert "No step has ended yet." in capsys.readouterr().out
        write_run(tmp_path / "run", enable=False)
        assert main(["top", str(tmp_path / "run"), "--once"]) == EXIT_BAD_INPUT
        assert "has no watch.jsonl; start the run with watch.enable=true" in capsys.readouterr().err

    @pytest.mark.parametrize("harm", ["nowhere", "file", "log is a folder", "run.json is none"])
    def test_what_is_no_run_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
    ) -> None:
        run = tmp_path / "run"
        if harm == "file":
            run.write_text("")
        elif harm != "nowhere":
            (run / WATCH_LOG).mkdir(parents=True)
        if harm == "run.json is none":
            (run / "run.json").write_text("{")
        assert main(["top", str(run), "--once"]) == EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert error.startswith("verl-profiling: error: ")
        assert error.count("\n") == 1


class TestLive:
    """In a terminal."""

    def test_a_file_that_fails_once_is_read_again(self, tmp_path: Path) -> None:
        """The next frame has its new steps; one that fails twice in a row is an error."""
        write_run(tmp_path)
        log, path = WatchLog(tmp_path), tmp_path / WATCH_LOG
        log(summary(1))
        live_run = LiveRun(tmp_path)
        live_run.read()
        for number in (2, 3):
            path.rename(tmp_path / "aside")
            path.mkdir()
            live_run.read()
            path.rmdir()
            (tmp_path / "aside").rename(path)
            log(summary(number))
            live_run.read()
            assert live_run.read().watch[-1].step == number
        (tmp_path / "run.json").write_text("{")
        live_run.read()
        with pytest.raises(TraceFormatError, match=r"run\.json"):
            live_run.read()

    @contextmanager
    def top(self, run: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """Run it in a terminal of its own; yield the process and the other end."""
        ours, theirs = pty.openpty()
        before = termios.tcgetattr(theirs)
        command = [*CLI, "top", str(run), "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process, ours
            assert termios.tcgetattr(theirs) == before
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            os.close(theirs)

    def until(self, terminal: int, text: bytes, seen: bytes = b"") -> bytes:
        """Return what the terminal shows until some text is there."""
        end = time.monotonic() + 20
        while text not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 1 << 16)
        assert text in seen, seen
        return seen

    def test_it_is_left_cleanly(self, run: Path) -> None:
        """The terminal is as it was, with what it showed before;
        the last frame is not left in it.
        """
        with self.top(run) as (process, terminal):
            seen = self.until(terminal, b"Ctrl-C quits")
            assert ENTERS in seen
            process.send_signal(signal.SIGINT)
            self.until(terminal, LEAVES, seen)
            assert process.wait(10) == EXIT_OK

    def test_it_is_left_before_the_first_frame(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("verl_profiling.commands.top.LiveRun.read", interrupted)
        monkeypatch.setenv("FORCE_COLOR", "1")  # the console takes this for a terminal
        assert main(["top", str(run)]) == EXIT_OK

    def test_it_follows_the_run_to_its_end(self, run: Path) -> None:
        """New steps come up by themselves; at the end the last frame stays in the terminal."""
        with self.top(run) as (process, terminal):
            self.until(terminal, b"step 29")
            WatchLog(run)(summary(30))
            self.until(terminal, b"step 30")
            write_run(run, end_ns=5)
            seen = self.until(terminal, LEAVES)
            seen = self.until(terminal, b"step_000012: anomaly", seen.partition(LEAVES)[2])
            assert b"training ended" in seen
            assert process.wait(10) == EXIT_OK


class TestHistory:
    """What lines of the log mean together, and step folders of a run that goes on."""

    def test_a_resumed_run_replaces_what_it_runs_again(self) -> None:
        """Steps that the start before had come to are not its future;
        the last line of a step counts.
        """
        before = logged_steps(summary(number) for number in range(10))
        later = {"begin_ns": 2 * 10**18, "end_ns": 2 * 10**18 + 10**10}
        made = (summary(5), summary(6, leader=""), summary(6))
        steps = logged_steps([msgspec.structs.replace(step, **later) for step in made], before)
        assert [step.step for step in steps] == [0, 1, 2, 3, 4, 5, 6]
        assert steps[-1].exposed[0].leader == "actor_rank2"

    def test_a_capture_that_goes_on_is_shown_as_such(self, tmp_path: Path) -> None:
        """And is looked at again when its manifest is written."""
        folder = build_step(tmp_path, step=3)
        for state, shown in (("begun", "schedule (still open)"), ("written", "schedule")):
            rewrite(folder, state=state)
            assert captures_so_far(tmp_path, 5) == (1, {folder.name: shown})

    def test_manifests_that_cannot_be_read_are_no_matter(self, tmp_path: Path) -> None:
        """A link that leads out, a pipe, nonsense, none at all, a run that vanished."""
        for number in range(4):
            (tmp_path / f"step_{number:06d}").mkdir()
        (tmp_path / "step_000000" / "manifest.json").symlink_to("/etc/passwd")
        os.mkfifo(tmp_path / "step_000001" / "manifest.json")
        (tmp_path / "step_000002" / "manifest.json").write_text('{"trigger": 3}')
        count, found = captures_so_far(tmp_path, 3)
        assert count == 4
        assert found == {f"step_{number:06d}": "no manifest yet" for number in (1, 2, 3)}
        assert captures_so_far(tmp_path / "gone", 3) == (0, {})


@pytest.mark.parametrize(("command", "left_out"), [("top --once", ""), ("check", "rich")])
def test_no_numerical_library_is_imported(
    run: Path, run_python: RunPython, command: str, left_out: str
) -> None:
    """It takes longer than all else that these commands do."""
    run_python(
        """
        import sys
        from verl_profiling.cli import main
        assert main(sys.argv[2:]) < 2
        heavy = {"numpy", "multiprocessing", *sys.argv[1].split()}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """,
        left_out,
        *command.split(),
        run,
    )


@pytest.mark.parametrize("columns", ["60", "240"])
def test_a_notice_is_shown_to_its_end(
    columns: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was noticed, before why it is not captured, on as many lines as it takes."""
    monkeypatch.setenv("COLUMNS", columns)
    write_run(tmp_path / "run", end_ns=1)
    log = WatchLog(tmp_path / "run")
    noticed = summary(1)
    reason = "step 1: stage update_actor took 4.00 s of the step; longest there: actor_rank3"
    noticed.noticed = Trigger(kind="anomaly", noticed=1, reason=f"{reason}; {'so it is; ' * 20}end")
    noticed.waits = (
        "step 0 was captured, and the watch pauses for 50 steps (watch.trigger.cooldown)"
    )
    log(noticed)
    assert main(["top", str(tmp_path / "run"), "--once"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert f"{noticed.noticed.reason} (waits: {noticed.waits})" in " ".join(shown.split())
