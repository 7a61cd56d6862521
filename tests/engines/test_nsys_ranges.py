"""Ranges of Nsight Systems around an engine's windows, whatever the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_loops import request

from verl_profiling import CaptureStateError, ConfigError, ProfilingConfig
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.engines import EngineAdapter, adapter_named
from verl_profiling.engines import recorder as recorders
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import RolloutOptions
from verl_profiling.steps.nsys import read_ranges
from verl_profiling.tools import nsys
from verl_profiling.tools.nsys import NsysOptions, NsysTool, Ranges, nsys_variables

IDENTITY = WorkerIdentity(role="rollout", rank=0, replica=1)


class Engine(EngineAdapter):
    """Records its calls, and fails those that it is configured to fail."""

    name = "noting"
    window = RolloutOptions()
    ranks = 2
    spool = Path("none")
    tool = NsysTool(NsysOptions())

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

    async def start(self) -> None:
        self._note("start")

    async def stop(self) -> None:
        self._note("stop")

    def identify(self, path: Path) -> int | None:
        return None

    def _note(self, call: str) -> None:
        if self.fails == call:
            raise OSError("the engine is gone")
        self.calls.append(call)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def recorder(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineRecorder:
    """A recorder in a process that was started for two ranges, and has opened none."""
    monkeypatch.setattr(nsys, "_ranges", Ranges())
    monkeypatch.setattr(recorders, "_DYING_S", 0.2)
    (tmp_path / "nsys").mkdir()
    for name, value in nsys_variables(tmp_path / "nsys" / "rollout", 2).items():
        monkeypatch.setenv(name, value)
    config = ProfilingConfig.from_any({"enable": True, "tool": "nsys", "save_path": str(tmp_path)})

    return EngineRecorder(engine, IDENTITY, config, RequestLog())


def window(run: Path, step: int, **more: bool) -> CaptureStart:
    return request(run / f"step_{step:06d}", step, stage="rollout", **more)


async def test_an_engine_that_does_not_start_opened_no_range(
    recorder: EngineRecorder, engine: Engine, tmp_path: Path
) -> None:
    """The next window is the first range: numbers are those that Nsight Systems counts."""
    engine.fails = "start"
    with pytest.raises(OSError, match="the engine is gone"):
        await recorder.start_capture(window(tmp_path, 1))
    engine.fails = ""
    await recorder.start_capture(window(tmp_path, 2))
    await recorder.stop_capture("run-2", 0)
    [[noted]] = read_ranges(tmp_path / "nsys")[0].values()
    assert (noted.number, noted.folder) == (1, "step_000002")


async def test_a_warm_up_is_a_range_too(recorder: EngineRecorder, tmp_path: Path) -> None:
    """It is counted, and its report will be thrown away."""
    await recorder.start_capture(window(tmp_path, 1, keep=False))
    assert (await recorder.stop_capture("run-1", 0)).result.status == "skipped"
    [[noted]] = read_ranges(tmp_path / "nsys")[0].values()
    assert not noted.keep


async def test_more_windows_than_announced(
    recorder: EngineRecorder, engine: Engine, tmp_path: Path
) -> None:
    """The engine is not started for a range that Nsight Systems would not record."""
    for step in (1, 2):
        await recorder.start_capture(window(tmp_path, step))
        await recorder.stop_capture(f"run-{step}", 0)
    with pytest.raises(CaptureStateError, match=r"rollout1: range 3: .* expected 2"):
        await recorder.start_capture(window(tmp_path, 3))
    assert engine.calls == ["start", "stop"] * 2


async def test_a_range_inside_of_a_range(
    recorder: EngineRecorder, engine: Engine, tmp_path: Path
) -> None:
    """A trainer in the same process has one open: a second one would not be seen,
    and is refused.
    """
    nsys.process_ranges().check("actor_rank0")
    nsys.process_ranges().note_opened(tmp_path / "step_000001", "actor_rank0.nsys-rep")
    with pytest.raises(CaptureStateError, match=r"a range is open .*, for actor_rank0\.nsys-rep"):
        await recorder.start_capture(window(tmp_path, 1))
    assert engine.calls == []


def test_nsys_records_an_engine_alone() -> None:
    """Another tool in an engine's processes is refused by name."""
    config = ProfilingConfig.from_any({"enable": True, "tool": ["nsys", "torch_memory"]})
    with pytest.raises(ConfigError, match=r"do not record with nsys and torch_memory"):
        adapter_named("vllm").tool_of(config.for_role("rollout"))
