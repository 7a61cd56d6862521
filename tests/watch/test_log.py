"""The log of the watch: bounded, never the run's problem, and read while it grows."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import summary

from verl_profiling.errors import TraceFormatError
from verl_profiling.watch.log import WatchLog
from verl_profiling.watch_log import OLDER_WATCH_LOG, WATCH_LOG, WatchLogReader, has_watch_log


def steps(reader: WatchLogReader) -> list[int]:
    """Return the numbers of the steps that are new."""
    return [step.step for step in reader.read()]


class TestWriting:
    """What a run does."""

    def test_a_line_holds_a_step(self, tmp_path: Path) -> None:
        """Its time, where that went, and each role's memory, but not the stages of every process."""
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

    def test_a_line_that_was_cut_off_costs_itself_alone(self, tmp_path: Path) -> None:
        """A run that is resumed after it was killed begins a line of its own."""
        WatchLog(tmp_path)(summary(1))
        with (tmp_path / WATCH_LOG).open("ab") as file:
            file.write(b'{"step":2,"begin')
        WatchLog(tmp_path)(summary(3))
        reader = WatchLogReader(tmp_path)
        assert steps(reader) == [1, 3]

    def test_a_full_disk_is_said_once_and_survived(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / WATCH_LOG).symlink_to("/dev/full")
        log = WatchLog(tmp_path)
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                log(summary(number))
            (tmp_path / WATCH_LOG).unlink()
            for number in range(3, 5):
                log(summary(number))
        assert len(caplog.records) == 1
        assert "No space left on device" in caplog.text
        assert steps(WatchLogReader(tmp_path)) == [3, 4]

    @pytest.mark.parametrize("harm", ["vanished", "a folder is there"])
    def test_a_folder_that_fails_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
    ) -> None:
        """And nothing hangs; the log goes on when the folder is as it should be."""
        run = tmp_path / "run"
        log = WatchLog(run)
        if harm == "a folder is there":
            (run / WATCH_LOG).mkdir(parents=True)
        with caplog.at_level(logging.WARNING):
            log(summary(1))
            log(summary(2))
        assert len(caplog.records) == 1
        assert str(run / WATCH_LOG) in caplog.text
        if harm == "vanished":
            run.mkdir()
        else:
            (run / WATCH_LOG).rmdir()
        log(summary(3))
        assert steps(WatchLogReader(run)) == [3]


class TestReading:
    """What ``top`` and the report do."""

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
            b"[]",
            b"{}",
            b'{"step":"x","begin_ns":1,"end_ns":2}',
            b'{"step":1e999,"begin_ns":1,"end_ns":2}',
            b'{"step":123456789012345678901234567890,"begin_ns":1,"end_ns":2}',
            b'{"step":1,"begin_ns":1,"end_ns":9e18}',
            b'{"step":1,"begin_ns":1,"end_ns":2,"exposed":[{"name":"a","exposed_ns":-1}]}',
            b'{"step":1,"begin_ns":1,"end_ns":2,"exposed":[{"name":"a","exposed_ns":1,"leader":5}]}',
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

    def test_a_line_without_end_takes_no_memory(self, tmp_path: Path) -> None:
        """Gigabytes without a line break are passed over piece by piece."""
        with (tmp_path / WATCH_LOG).open("wb") as file:
            file.truncate(60 << 20)
        reader = WatchLogReader(tmp_path)
        assert steps(reader) == []

    def test_a_log_that_leads_elsewhere_is_refused(self, tmp_path: Path) -> None:
        """A folder that came from somebody does not make a reader open other files."""
        run = tmp_path / "run"
        run.mkdir()
        (tmp_path / "secret").write_text("{}")
        (run / WATCH_LOG).symlink_to(tmp_path / "secret")
        with pytest.raises(TraceFormatError, match="not a path inside of it"):
            steps(WatchLogReader(run))

    def test_a_folder_or_a_pipe_is_no_log(self, tmp_path: Path) -> None:
        """It is an error that names it, and does not hang."""
        (tmp_path / WATCH_LOG).mkdir()
        with pytest.raises(TraceFormatError, match="cannot be read"):
            steps(WatchLogReader(tmp_path))
        (tmp_path / WATCH_LOG).rmdir()
        os.mkfifo(tmp_path / WATCH_LOG)
        with pytest.raises(TraceFormatError, match="neither a regular file"):
            steps(WatchLogReader(tmp_path))
