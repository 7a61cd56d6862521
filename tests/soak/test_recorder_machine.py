"""The recorder of an engine against a model of it: calls in any order, and an engine that fails anywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from verl_profiling import CaptureStateError, ProfilingConfig
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.engines import recorder
from verl_profiling.engines.adapter import SPOOL_PARENT, EngineAdapter, EngineTrace
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.rollout import RolloutOptions
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool

REPLICA = WorkerIdentity(role="rollout", replica=0)
TOOL = TorchTool(TorchOptions())
RANKS = 2
TRACE = json.dumps({"traceEvents": [{"ph": "X", "name": "kernel", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]})
AT_START = st.sampled_from(["", "", "", "start raises", "start is late", "no folder", "died"])
AT_STOP = st.sampled_from(
    ["", "", "stop raises", "stop is late", "died", "a trace is cut", "no trace", "the folder is gone"]
)


class StandIn(EngineAdapter):
    """An engine of two ranks that notes when it is misused."""

    name = "stand-in"
    device = "cpu"
    window = RolloutOptions()
    ranks = RANKS

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.records = False
        self.fault = ""
        self.misused: list[str] = []
        self.may_go_on = asyncio.Event()
        self._label = ""

    async def start(self, label: str) -> None:
        self._answer("start")
        if self.fault == "start is late":
            await self.may_go_on.wait()
        if self.records:
            self.misused.append("started twice")
        self.records, self._label = True, label

    async def stop(self) -> None:
        if not self.records and self.fault != "died":
            self.misused.append("stopped twice")
        if self.fault == "stop is late":
            await self.may_go_on.wait()
        self.records = False
        self._answer("stop")
        for rank in range(RANKS if self.fault != "no trace" else 0):
            cut = len(TRACE) // 2 if self.fault == "a trace is cut" and rank else len(TRACE)
            (self.spool / f"{self._label}.{rank}.json").write_text(TRACE[:cut])

    def identify(self, path: Path, label: str) -> EngineTrace | None:
        found, rank, _ = path.name.rsplit(".", 2)
        return EngineTrace(int(rank)) if found == label else None

    def died(self) -> str:
        return "core ended with SIGKILL" if self.fault == "died" else ""

    def _answer(self, method: str) -> None:
        if self.fault in (f"{method} raises", "died"):
            raise RuntimeError("planned")


class RecorderMachine(RuleBasedStateMachine):
    """Calls the recorder from several threads, and knows what each call must do."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.numbers = itertools.count(1)
        self.live: CaptureRequest | None = None
        self.halted = False
        self.opening: list[Any] = []
        self.overdue = False
        self.last: CaptureResult | None = None

    @initialize()
    def set_up(self) -> None:
        """Make a recorder on the loop."""
        config = ProfilingConfig.from_any(
            {"enable": True, "save_path": str(self.folder), "rollout": {"stop_s": 0.05}}
        )

        async def make() -> None:
            self.engine = StandIn(self.folder / SPOOL_PARENT / "engine")
            self.recorder = EngineRecorder(self.engine, TOOL, REPLICA, config, RequestLog())

        self.call(make())

    def submit(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Begin a call on the loop, from a thread of its own."""
        begun: list[Any] = []
        thread = threading.Thread(
            target=lambda: begun.append(asyncio.run_coroutine_threadsafe(call, self.loop))
        )
        thread.start()
        thread.join()
        return begun[0]

    def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Call, and wait; half a minute is a hang."""
        return self.submit(call).result(timeout=30)

    def request(self, fault: str = "", keep: bool = True) -> CaptureRequest:
        """Return the request of a new capture."""
        number = next(self.numbers)
        folder = self.folder / f"step_{number}"
        if fault == "no folder":
            folder.touch()
            folder /= "step"
        return CaptureRequest(
            capture_id=str(number), run_id="run", step=number, folder=str(folder), keep=keep
        )

    @rule(fault=AT_START, keep=st.sampled_from([True, True, False]))
    def start(self, fault: str, keep: bool) -> None:
        """A new capture opens if none is open, and the engine is alive, ready and willing."""
        if self.opening:
            return
        request = self.request(fault, keep)
        if self.live is not None:
            return  # it would close the open one
        if self.overdue:
            with pytest.raises(CaptureStateError, match="still writing"):
                self.call(self.recorder.start(request))
            return
        self.engine.fault = fault
        if fault == "died":
            with pytest.raises(CaptureStateError, match="stand-in died"):
                self.call(self.recorder.start(request))
            self.engine.fault = ""
        elif fault == "start raises":
            with pytest.raises(RuntimeError, match="planned"):
                self.call(self.recorder.start(request))
        elif fault == "no folder" and keep:
            with pytest.raises(OSError, match="step"):
                self.call(self.recorder.start(request))
        elif fault == "start is late":
            self.engine.may_go_on.clear()
            self.opening.append(self.submit(self.recorder.start(request)))
            self.live = request
        else:
            assert self.call(self.recorder.start(request)).status == "recording"
            self.live = request

    @precondition(lambda self: self.opening)
    @rule(stops=st.booleans(), joins=st.booleans())
    def it_has_started(self, stops: bool, joins: bool) -> None:
        """What was asked while the engine was starting is done afterwards, a stop too."""
        assert self.live is not None
        if joins:
            self.opening.append(self.submit(self.recorder.start(self.live)))
        stopping = self.submit(self.recorder.stop(self.live.capture_id, 0.0)) if stops else None
        self.loop.call_soon_threadsafe(self.engine.may_go_on.set)
        statuses = [future.result(timeout=30).status for future in self.opening]
        assert statuses == ["recording", "joined"][: len(statuses)]
        self.opening, self.engine.fault = [], ""
        if stopping is not None:
            result = stopping.result(timeout=30).result
            assert result.capture_id == self.live.capture_id
            assert not self.engine.records
            self.live, self.last = None, result

    @precondition(lambda self: self.live is not None and not self.opening)
    @rule()
    def join(self) -> None:
        """The same request again changes nothing."""
        assert self.call(self.recorder.start(self.live)).status == "joined"

    @precondition(lambda self: self.live is not None and not self.opening and not self.halted)
    @rule(fault=st.sampled_from(["", "stop raises"]))
    def the_time_is_up(self, fault: str) -> None:
        """``rollout.max_window_s`` stops the engine, and leaves the capture open."""
        self.engine.fault = fault

        async def halt() -> None:
            window = self.recorder._window
            assert window is not None
            self.recorder._end_by_time(window, 1.0)
            assert self.recorder._halting is not None
            await asyncio.gather(self.recorder._halting, return_exceptions=True)

        self.call(halt())
        self.halted = True

    @rule(fault=AT_STOP, named=st.sampled_from(["any", "the open one", "the last", "an unknown one"]))
    def stop(self, fault: str, named: str) -> None:
        """The open one ends with all its artifacts accounted for; another call changes nothing."""
        if self.opening:
            return
        ends = self.live is not None and named in ("any", "the open one")
        if ends and not self.halted:
            self.engine.fault = fault
            self.engine.may_go_on.clear()
        if ends and fault == "the folder is gone":
            assert self.live is not None
            shutil.rmtree(self.live.folder, ignore_errors=True)
        capture_id = {
            "any": None,
            "the open one": self.live.capture_id if self.live else "0",
            "the last": self.last.capture_id if self.last else "0",
            "an unknown one": "0",
        }[named]
        reply = self.call(self.recorder.stop(capture_id, 5.0))
        result = reply.result
        if ends:
            self.ended(result)
        elif self.last is not None and capture_id in (None, self.last.capture_id):
            assert result.capture_id == self.last.capture_id
        else:
            assert result.status == "skipped"

    def ended(self, result: CaptureResult) -> None:
        """Look at the result of the capture that was open."""
        assert self.live is not None
        assert result.capture_id == self.live.capture_id
        fault = self.engine.fault
        if not self.live.keep:
            assert result.artifacts == []
        else:
            final = {artifact.lane: artifact.status for artifact in result.artifacts}
            whole = {f"rollout0_rank{rank}" for rank in range(RANKS)}
            assert final.keys() == whole
            assert set(final.values()) <= {"ok", "failed", "truncated"}
            gone = not Path(self.live.folder).exists()
            if not fault and not gone:
                assert set(final.values()) == {"ok"}
            if fault == "a trace is cut" and not gone:
                assert sorted(final.values()) == ["ok", "truncated"]
        self.overdue = fault == "stop is late" and not self.halted
        if fault == "died":
            self.engine.records = False
        if not self.overdue:
            self.engine.fault = ""
        self.live, self.last, self.halted = None, result, False

    @precondition(lambda self: not self.opening and not self.overdue)
    @rule(at_start=AT_START, at_stop=AT_STOP)
    def capture(self, at_start: str, at_stop: str) -> None:
        """A whole capture, as a loop makes it: calls at random seldom get this far."""
        self.stop("", "any")
        self.start(at_start, True)
        self.stop(at_stop, "any")

    @precondition(lambda self: self.overdue)
    @rule()
    def it_has_written(self) -> None:
        """An engine that finishes late can be captured again."""
        self.loop.call_soon_threadsafe(self.engine.may_go_on.set)

        async def written() -> None:
            assert self.recorder._halting is not None
            await asyncio.wait([self.recorder._halting])

        self.call(asyncio.wait_for(written(), 20))
        self.overdue, self.engine.fault = False, ""

    @precondition(lambda self: not self.opening and not self.overdue)
    @rule(calls=st.lists(st.sampled_from(["start", "join", "stop", "stop another"]), min_size=2, max_size=5))
    def race(self, calls: list[str]) -> None:
        """Calls at the same moment end, and leave a recorder that can be used."""
        self.engine.fault = ""
        known = self.live or self.request()
        doing = {
            "start": lambda: self.recorder.start(self.request()),
            "join": lambda: self.recorder.start(known),
            "stop": lambda: self.recorder.stop(None, 0.0),
            "stop another": lambda: self.recorder.stop("0", 0.0),
        }
        for name, future in [(name, self.submit(doing[name]())) for name in calls]:
            try:
                future.result(timeout=30)
            except CaptureStateError:
                assert name in ("start", "join")
        result = self.call(self.recorder.stop(None, 5.0)).result
        self.live, self.halted = None, False
        self.last = result if result.capture_id else None

    @invariant()
    def is_what_the_model_says(self) -> None:
        """The engine records while a capture is open, is called in turn, and leaves no file in its spool."""
        if not hasattr(self, "engine"):
            return
        assert self.engine.misused == []
        if not self.opening:
            open_now = self.live is not None and not self.halted
            assert self.engine.records == (open_now or self.overdue)
            assert (self.recorder._window is None) == (self.live is None)
        if self.live is None and not self.overdue and self.engine.spool.exists():
            assert list(self.engine.spool.iterdir()) == []

    def teardown(self) -> None:
        """End the loop, and whatever still waits on it."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        if hasattr(self, "recorder"):
            self.recorder._slot.background.drain(30)  # an engine that wrote late
        shutil.rmtree(self.folder)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecorderMachine]:
    """A machine that a test drives itself."""
    look_often(monkeypatch)
    machine = RecorderMachine()
    machine.set_up()
    yield machine
    machine.is_what_the_model_says()
    machine.teardown()


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for a dead engine often, and do not wait for it to end."""
    monkeypatch.setattr(recorder, "_DYING_S", 0.0)
    monkeypatch.setattr(recorder, "_LOOK_EVERY_S", 0.01)


def test_a_stop_that_comes_while_the_engine_starts_ends_the_capture(machine: RecorderMachine) -> None:
    """It was skipped, and the engine then recorded for ever: no later capture could be opened."""
    machine.start("start is late", True)
    machine.it_has_started(stops=True, joins=False)
    machine.start("", True)
    machine.stop("", "any")


@pytest.mark.parametrize("fault", ["the folder is gone", "stop raises", "died"])
def test_an_engine_can_be_captured_again_whatever_became_of_its_traces(
    machine: RecorderMachine, fault: str
) -> None:
    """A trace that could not be moved left the capture open, and every later start was refused."""
    machine.start("", True)
    machine.stop(fault, "any")
    machine.start("", True)
    machine.stop("", "any")


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(8, 15), pytest.param(1000, 40, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_a_recorder_does_what_its_model_says(
    examples: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis prints the calls that lead to a breach, the fewest that it finds."""
    look_often(monkeypatch)
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=examples < 100,
        database=None,
        print_blob=True,
    )
    run_state_machine_as_test(RecorderMachine, settings=how)
