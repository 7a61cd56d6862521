"""The mixin: it adds two methods to any class, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from example_loops import request, settings

from verl_profiling import ConfigError, ToolUnavailableError, stage
from verl_profiling.capture.session import Session
from verl_profiling.workers import CaptureMixin, RolloutCaptureMixin


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


def test_it_composes_with_a_class_that_has_a_constructor(tmp_path: Path, session: Session) -> None:
    """No ``__init__`` of ours: the other base class gets its arguments."""
    worker = Worker(5, settings(tool="spans"), rank=numpy.int64(2))
    assert worker.value == 5
    started = worker.start_capture(request(tmp_path))
    assert worker.update() == 5
    result = worker.stop_capture("run-1").result
    assert (started.status, result.status) == ("recording", "ok")
    assert (result.identity.role, result.identity.rank, result.identity.world_size) == (
        "actor",
        2,
        4,
    )
    assert result.identity.topology == {"dp": 2}
    assert [span.name for span in result.stages] == ["update_actor"]


def test_values_with_which_no_manifest_could_be_read_are_refused(session: Session) -> None:
    """Such as the rank of an environment variable."""
    worker = CaptureMixin()
    for wrong in ({"rank": "3"}, {"topology": {"tp": "0"}}, {"role": 3}):
        with pytest.raises(ConfigError, match=r"init_capture: Expected `.*`, got `.*"):
            worker.init_capture(settings(tool="spans"), **{"role": "actor", **wrong})
    with pytest.raises(ConfigError, match="init_capture: Expected `int`, got `str`"):
        RolloutCaptureMixin().init_capture(settings(tool="spans"), replica="last")  # type: ignore[arg-type]


def test_it_adds_only_what_it_documents() -> None:
    public = {name for name in vars(CaptureMixin) if not name.startswith("_")}
    assert public == {"capture", "init_capture", "read_watch", "start_capture", "stop_capture"}


def test_slow_imports_are_paid_at_set_up(run_python: Any) -> None:
    """The first capture imports nothing, in a process that has done nothing else."""
    run_python(
        """
        import sys
        from pathlib import Path
        from example_loops import request, settings
        from verl_profiling.workers import CaptureMixin

        worker = CaptureMixin()
        worker.init_capture(settings(), role="actor")
        before = set(sys.modules)
        worker.start_capture(request(Path.cwd()))
        imported = set(sys.modules) - before
        worker.stop_capture("run-1", 30)
        assert not imported, imported
        """
    )


def test_a_rank_that_is_not_selected_prepares_no_tool(session: Session) -> None:
    """A tool that is missing on unselected ranks does no harm there."""
    tool = "tools.test_third_party:FailsAtPrepare"
    Worker(1, settings(tool=tool, select={"ranks": "0"}), rank=1)
    with pytest.raises(ToolUnavailableError, match="install something"):
        Worker(1, settings(tool=tool, select={"ranks": "0"}), rank=0)
