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


@pytest.mark.parametrize(
    ("mode", "names"), [("e2e", [""]), ("discrete", [".update_actor.2", ".update_actor"])]
)
def test_the_example_records_steps_and_stages(tmp_path: Path, mode: str, names: list[str]) -> None:
    """A tool named by its class writes artifacts under canonical names,
    without a line for either mode.
    """
    with record_step(settings(tool=EXAMPLE, mode=mode), tmp_path) as recorded:
        for _ in range(2):
            with stage("update_actor"):
                crunch()
    assert recorded.result.status == "ok", recorded.result.reason
    files = [f"actor_rank0{name}.cprofile.txt" for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*files, "actor_rank0.result.json"]
    )
    for artifact in recorded.result.artifacts:
        path = tmp_path / artifact.path
        assert "crunch" in path.read_text()
        assert (artifact.tool, artifact.bytes) == ("cprofile", path.stat().st_size)


def test_options_of_a_tool_are_checked_like_all_others() -> None:
    assert (
        settings(tool=EXAMPLE, tools={EXAMPLE: {"rows": 3}}).for_role("actor").tools[0].options.rows
        == 3
    )
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


FailsAtPrepare, FailsAtStart, FailsAtStop, FailsAtBegin, FailsAtEnd = (
    type(f"FailsAt{where.title()}", (Flawed,), {"fails": where, "__module__": __name__})
    for where in ("prepare", "start", "stop", "begin", "end")
)


def of(cls: type[Tool], **more: Any) -> Any:
    return settings(tool=f"{cls.__module__}:{cls.__qualname__}", **more)


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
    with (
        record_step(of(FailsAtStart, mode="discrete"), tmp_path) as recorded,
        stage("update_actor"),
    ):
        ran.append(1)
    assert ran
    assert recorded.result.status == "failed"
    assert recorded.result.reason == "start raised OSError: no device"
    assert [(a.stage, a.status) for a in recorded.result.artifacts] == [("update_actor", "failed")]


@pytest.mark.parametrize("tool", [FailsAtBegin, FailsAtEnd])
def test_a_tool_that_cannot_show_stages_costs_no_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tool: type[Tool]
) -> None:
    """User code in the stage goes on, as on a step that is not captured;
    it is logged once and noted.
    """
    done = []
    with record_step(of(tool), tmp_path) as recorded:
        for name in ("old_log_prob", "update_actor"):
            with stage(name):
                done.append(name)
    assert done == ["old_log_prob", "update_actor"]
    assert [span.name for span in recorded.result.stages][-2:] == done
    [note] = recorded.result.notes
    assert note.endswith("marks no more: OSError: no range")
    assert caplog.messages.count(note) == 1


def test_a_tool_that_cannot_stop_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its artifact is failed, what the other tool recorded is kept, and one line is logged."""
    both = [f"{__name__}:FailsAtStop", "torch"]
    with caplog.at_level(logging.ERROR), record_step(settings(tool=both), tmp_path) as recorded:
        crunch()
    assert recorded.result.status == "failed"
    assert {a.tool: a.status for a in recorded.result.artifacts} == {
        "flawed": "failed",
        "torch": "ok",
    }
    [line] = [record.getMessage() for record in caplog.records]
    assert "actor rank 0" in line
    assert "tool flawed failed to stop in step 1: device lost" in line
