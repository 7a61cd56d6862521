"""The log of the watch: bounded, never the run's problem, and read while it grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import summary

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.watch_log import (
    OLDER_WATCH_LOG,
    WATCH_LOG,
    WatchLogReader,
    has_watch_log,
    read_watch_log,
)
from verl_profiling.watch.log_writer import WatchLog


def steps(reader: WatchLogReader) -> list[int]:
    return [step.step for step in reader.read()]


class TestWriting:
    """What a run does."""

    def test_a_line_holds_a_step(self, tmp_path: Path) -> None:
        """Its time, where that went, and each role's memory,
        but not the stages of every process.
        """
        WatchLog(tmp_path)(summary(7, captured="step_000007"))
        (line,) = (tmp_path / WATCH_LOG).read_text().splitlines()
        assert "stages" not in line
        (step,) = WatchLogReader(tmp_path).read()
        given = summary(7, captured="step_000007")
        assert step == msgspec.structs.replace(given, loop=[], workers=[])
        assert (step.step, step.seconds, step.captured) == (7, 9.5, "step_000007")
        assert step.exposed_s == {"rollout": 5.0, "old_log_prob": 1.0, "update_actor": 3.0, "": 0.5}
        memory = {role.role: role for role in step.memory}
        assert (memory["actor"].lane, memory["actor"].processes) == ("actor_rank3", 4)
        assert (memory["actor"].peak_bytes, memory["actor"].held_bytes) == (9 * 10**9, 3 * 10**9)
        assert memory["controller"].peak_bytes is None

    def test_it_has_two_bounded_parts(self, tmp_path: Path) -> None:
        """The latest steps are kept, however long the run is."""
        log = WatchLog(tmp_path, max_part_bytes=4000)
        for number in range(100):
            log(summary(number))
        assert sorted(path.name for path in tmp_path.iterdir()) == [OLDER_WATCH_LOG, WATCH_LOG]
        assert all(path.stat().st_size <= 4000 for path in tmp_path.iterdir())
        found = steps(WatchLogReader(tmp_path))
        assert found == list(range(100 - len(found), 100))
        assert len(found) > 4

    def test_a_line_that_was_cut_off_costs_two_steps_at_most(self, tmp_path: Path) -> None:
        """Its own, and the first of the run that is resumed after it was killed."""
        WatchLog(tmp_path)(summary(1))
        with (tmp_path / WATCH_LOG).open("ab") as file:
            file.write(b'{"step":2,"begin')
        log = WatchLog(tmp_path)
        log(summary(3))
        log(summary(4))
        assert steps(WatchLogReader(tmp_path)) == [1, 4]

    @pytest.mark.parametrize("harm", ["no space", "no folder", "a folder is there"])
    def test_what_cannot_be_written_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
    ) -> None:
        """And nothing hangs; the log goes on when it can."""
        run, file = tmp_path / "run", tmp_path / "run" / WATCH_LOG
        log = WatchLog(run)
        if harm == "no space":
            run.mkdir()
            file.symlink_to("/dev/full")
        elif harm == "a folder is there":
            file.mkdir(parents=True)
        log(summary(1))
        log(summary(2))
        [said] = caplog.messages
        assert str(file) in said
        {"no space": file.unlink, "no folder": run.mkdir, "a folder is there": file.rmdir}[harm]()
        log(summary(3))
        log(summary(4))
        assert steps(WatchLogReader(run)) == [3, 4]


class TestReading:
    """What ``top`` and the report do."""

    def test_a_log_is_read_once_until_it_grows(self, tmp_path: Path) -> None:
        assert read_watch_log(tmp_path) == []
        log = WatchLog(tmp_path, max_part_bytes=4000)
        log(summary(1))
        assert read_watch_log(tmp_path) is read_watch_log(tmp_path)
        for number in range(2, 100):
            log(summary(number))
            assert read_watch_log(tmp_path)[-1].step == number

    def test_only_what_is_new_is_read(self, tmp_path: Path) -> None:
        """Also of a log that is not there yet, and of a line whose end is still to come."""
        reader = WatchLogReader(tmp_path)
        assert not has_watch_log(tmp_path)
        assert steps(reader) == []
        log = WatchLog(tmp_path)
        log(summary(1))
        assert has_watch_log(tmp_path)
        assert steps(reader) == [1]
        assert steps(reader) == []
        log(summary(2))
        whole = (tmp_path / WATCH_LOG).read_bytes()
        (tmp_path / WATCH_LOG).write_bytes(whole[:-20])
        assert steps(reader) == []
        (tmp_path / WATCH_LOG).write_bytes(whole)
        assert steps(reader) == [2]

    def test_it_follows_a_log_that_is_rotated(self, tmp_path: Path) -> None:
        """No step is lost or read twice while at most one part is begun between two looks."""
        log, reader = WatchLog(tmp_path, max_part_bytes=4000), WatchLogReader(tmp_path)
        found = []
        for number in range(60):
            log(summary(number))
            if number % 3 == 0:
                found += steps(reader)
        assert found + steps(reader) == list(range(60))

    @pytest.mark.parametrize(
        "line",
        [
            b"null",
            b"{}",
            b'{"step":"x","begin_ns":1,"end_ns":2}',
            b'{"step":1e999,"begin_ns":1,"end_ns":2}',
            b'{"step":1,"begin_ns":1,"end_ns":2,"exposed":[{"name":"a","exposed_ns":-1}]}',
            b"\xff\xfe\x00",
            b"[" * 10_000,
            b'{"step":1,"begin_ns":1,"end_ns":2,"captured":"' + b"x" * (2 << 20) + b'"}',
        ],
        ids=lambda line: line[:24].decode(errors="replace"),
    )
    def test_a_line_that_is_none_is_left_out(self, tmp_path: Path, line: bytes) -> None:
        log = WatchLog(tmp_path)
        log(summary(1))
        with (tmp_path / WATCH_LOG).open("ab") as file:
            file.write(line + b"\n")
        log(summary(2))
        reader = WatchLogReader(tmp_path)
        assert steps(reader) == [1, 2]

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda path: path.symlink_to("/etc/hostname"), "is a link"),
            (Path.mkdir, "cannot be read"),
            (os.mkfifo, "is not a regular file"),
        ],
        ids=["a link that leads out", "a folder", "a pipe"],
    )
    def test_what_is_no_log_is_refused(
        self, tmp_path: Path, make: Callable[[Path], None], said: str
    ) -> None:
        """It is an error that names it; nothing else is opened, and nobody waits."""
        make(tmp_path / WATCH_LOG)
        with pytest.raises(TraceFormatError, match=said):
            steps(WatchLogReader(tmp_path))
