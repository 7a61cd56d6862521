"""Tools that users write: the documented example, and ones that misbehave."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from verl_profiling import ConfigError, ToolUnavailableError, stage
from verl_profiling.manifest import Artifact
from verl_profiling.testing import record_step
from verl_profiling.tools import Destination, Output, Recording, Tool
from verl_profiling.tools.base import Marks

EXAMPLE = "tests.tools.example_tool:CProfileTool"


def crunch() -> int:
    return sum(n * n for n in range(1000))


def test_the_example_records_a_whole_step(tmp_path: Path) -> None:
    """A tool named by its class writes its artifact under a canonical name."""
    with record_step(settings(tool=EXAMPLE), tmp_path) as recorded, stage("update_actor"):
        crunch()
    assert recorded.result.status == "ok", recorded.result.reason
    assert recorded.path == tmp_path / "actor_rank0.cprofile.txt"
    assert "crunch" in recorded.path.read_text()
    [artifact] = recorded.result.artifacts
    assert (artifact.tool, artifact.bytes) == ("cprofile", recorded.path.stat().st_size)


def test_the_example_records_stages_apart(tmp_path: Path) -> None:
    """The same class works in discrete mode, without a line for it."""
    with record_step(settings(tool=EXAMPLE, mode="discrete"), tmp_path):
        for _ in range(2):
            with stage("update_actor"):
                crunch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "actor_rank0.result.json",
        "actor_rank0.update_actor.2.cprofile.txt",
        "actor_rank0.update_actor.cprofile.txt",
    ]


def test_options_of_a_tool_are_checked_like_all_others() -> None:
    assert settings(tool=EXAMPLE, tools={EXAMPLE: {"rows": 3}}).for_role("actor").tools[0].options.rows == 3
    with pytest.raises(ConfigError, match="choose from: cumulative, tottime, calls") as caught:
        settings(tool=EXAMPLE, tools={EXAMPLE: {"sort": "size"}})
    assert caught.value.key == f"tools.{EXAMPLE}.sort"


class Flawed(Tool):
    name = "flawed"
    suffix = ".flawed"
    fails = ""

    def prepare(self) -> None:
        if self.fails == "prepare":
            raise ToolUnavailableError("flawed: install something")

    def start(self, destination: Destination) -> Recording:
        if self.fails == "start":
            raise OSError("no device")
        return FlawedRecording(destination, self.fails)


class FlawedRecording(Recording):
    """Fails where its tool does; ``marks`` shows stages, but for where it fails to."""

    discarded: list[str] = []

    def __init__(self, destination: Destination, fails: str) -> None:
        self.destination = destination
        self.fails = fails

    @property
    def marks(self) -> Marks | None:
        def fail(argument: object) -> object:
            raise OSError("no range")

        return {"begin": Marks(fail, str), "end": Marks(str, fail)}.get(self.fails)

    def stop(self) -> list[Output]:
        if self.fails == "stop":
            raise OSError("device lost")
        return [Output(self.destination.artifact(Flawed), self._finish)]

    def _finish(self) -> Artifact:
        raise ValueError("cannot compress")

    def discard(self) -> None:
        self.discarded.append(self.destination.lane)


class FailsAtPrepare(Flawed):
    fails = "prepare"


class FailsAtStart(Flawed):
    fails = "start"


class FailsAtStop(Flawed):
    fails = "stop"


class FailsAtBegin(Flawed):
    fails = "begin"


class FailsAtEnd(Flawed):
    fails = "end"


def of(cls: type[Tool], **more: Any) -> Any:
    return settings(tool=f"{cls.__module__}:{cls.__qualname__}", **more)


def test_a_tool_that_cannot_work_is_found_at_set_up(tmp_path: Path) -> None:
    """``prepare`` is where a missing library is reported, before training begins."""
    with (
        pytest.raises(ToolUnavailableError, match="install something"),
        record_step(of(FailsAtPrepare), tmp_path),
    ):
        pass


def test_a_tool_that_cannot_start_leaves_nothing_open(tmp_path: Path, session: Any) -> None:
    """The next capture finds the process idle; other tools that record already are stopped."""
    with pytest.raises(OSError, match="no device"), record_step(of(FailsAtStart), tmp_path):
        pass
    assert session.sink is None
    with record_step(settings(tool="spans"), tmp_path) as recorded:
        pass
    assert recorded.result.status == "ok"
    FlawedRecording.discarded.clear()
    both, folder = [f"{__name__}:Flawed", f"{__name__}:FailsAtStart"], tmp_path / "both"
    with pytest.raises(OSError, match="no device"), record_step(settings(tool=both), folder):
        pass
    assert FlawedRecording.discarded == ["actor_rank0"]
    assert list(folder.iterdir()) == []


def test_a_stage_whose_tool_cannot_start_runs_all_the_same(tmp_path: Path) -> None:
    """In discrete mode the failure belongs to the stage's artifact, and the stage to the user."""
    ran = []
    with record_step(of(FailsAtStart, mode="discrete"), tmp_path) as recorded, stage("update_actor"):
        ran.append(1)
    assert ran
    assert recorded.result.status == "failed"
    assert recorded.result.reason == "start raised OSError: no device"
    assert [(a.stage, a.status) for a in recorded.result.artifacts] == [("update_actor", "failed")]


@pytest.mark.parametrize("tool", [FailsAtBegin, FailsAtEnd])
def test_a_tool_that_cannot_show_stages_costs_no_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tool: type[Tool]
) -> None:
    """User code in the stage goes on, as on a step that is not captured; it is logged once and noted."""
    done = []
    with record_step(of(tool), tmp_path) as recorded:
        for name in ("old_log_prob", "update_actor"):
            with stage(name):
                done.append(name)
    assert done == ["old_log_prob", "update_actor"]
    assert [span.name for span in recorded.result.stages][-2:] == done
    [note] = recorded.result.notes
    assert note.endswith("shows no others: OSError: no range")
    assert caplog.messages.count(note) == 1


def test_a_tool_that_cannot_stop_fails_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its artifact is failed, what the other tool recorded is kept, and one line is logged."""
    both = [f"{__name__}:FailsAtStop", "torch"]
    with caplog.at_level(logging.ERROR), record_step(settings(tool=both), tmp_path) as recorded:
        crunch()
    assert recorded.result.status == "failed"
    assert {a.tool: a.status for a in recorded.result.artifacts} == {"flawed": "failed", "torch": "ok"}
    [line] = [record.getMessage() for record in caplog.records]
    assert "actor rank 0" in line
    assert "tool flawed failed to stop in step 1: device lost" in line
