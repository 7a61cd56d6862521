"""The mixin: it adds two methods to any class, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from verl_profiling import CaptureStateError, ToolUnavailableError, stage
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import Session
from verl_profiling.workers import CaptureMixin


class Base:
    def __init__(self, value: int) -> None:
        self.value = value


class Worker(CaptureMixin, Base):
    def __init__(self, value: int, config: Any, rank: int = 0) -> None:
        super().__init__(value)
        self.init_capture(config, role="actor", rank=rank, world_size=4, topology={"dp": rank})

    @stage("update_actor")
    def update(self) -> int:
        return self.value


def request(folder: Path) -> CaptureRequest:
    return CaptureRequest(capture_id="run-1", run_id="run", step=1, folder=str(folder))


def test_it_composes_with_a_class_that_has_a_constructor(tmp_path: Path, session: Session) -> None:
    """No ``__init__`` of ours: the other base class gets its arguments."""
    worker = Worker(5, settings(tool="spans"), rank=2)
    assert worker.value == 5
    started = worker.start_capture(request(tmp_path))
    assert worker.update() == 5
    result = worker.stop_capture("run-1").result
    assert (started.status, result.status) == ("recording", "ok")
    assert (result.identity.role, result.identity.rank, result.identity.world_size) == ("actor", 2, 4)
    assert result.identity.topology == {"dp": 2}
    assert [span.name for span in result.stages] == ["update_actor"]


def test_it_adds_only_what_it_documents() -> None:
    public = {name for name in vars(CaptureMixin) if not name.startswith("_")}
    assert public == {"capture", "init_capture", "read_watch", "start_capture", "stop_capture"}


def test_driving_a_worker_that_is_not_set_up_names_the_missing_call(tmp_path: Path, session: Session) -> None:
    class Forgot(CaptureMixin):
        pass

    with pytest.raises(CaptureStateError, match=r"Forgot is not set up; call init_capture\(config, role="):
        Forgot().start_capture(request(tmp_path))
    assert Forgot().stop_capture().result.status == "skipped"


def test_slow_imports_are_paid_at_set_up(run_python: Any) -> None:
    """The first capture starts within 50 ms, in a process that has done nothing else."""
    run_python(
        """
        import time
        from pathlib import Path
        from example_loops import settings
        from verl_profiling.capture.messages import CaptureRequest
        from verl_profiling.workers import CaptureMixin

        worker = CaptureMixin()
        worker.init_capture(settings(), role="actor")
        request = CaptureRequest(capture_id="r", run_id="r", step=1, folder=str(Path.cwd()))
        begin = time.process_time()
        worker.start_capture(request)
        took = time.process_time() - begin
        worker.stop_capture("r", 30)
        assert took < 0.05, took
        """
    )


def test_a_rank_that_is_not_selected_prepares_no_tool(session: Session) -> None:
    """A tool that is missing on unselected ranks does no harm there."""
    tool = "tools.test_third_party:FailsAtPrepare"
    Worker(1, settings(tool=tool, select={"ranks": "0"}), rank=1)
    with pytest.raises(ToolUnavailableError, match="install something"):
        Worker(1, settings(tool=tool, select={"ranks": "0"}), rank=0)
