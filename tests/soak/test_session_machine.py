"""The session against a model of it: any calls in any order, from several threads, with tools that fail."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from verl_profiling import CaptureStateError, ProfilingConfig
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import Session
from verl_profiling.capture.stage import Stage
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.tools import Destination, Output, Recording, Tool

HERE = 3  # threads
THREADS = st.integers(0, HERE - 1)
STAGES = st.sampled_from(["update_actor", "reward"])
FAULTS = st.sampled_from(["", "", "", "start", "stop", "discard", "start, discard", "step", "finish"])


class CountedTool(Tool):
    """Counts its open recordings, and fails where it is told to."""

    name: ClassVar[str] = "counted"
    suffix: ClassVar[str] = ".counted.txt"
    open: ClassVar[list[Recording]] = []
    misused: ClassVar[list[str]] = []
    fails: ClassVar[str] = ""

    def start(self, destination: Destination) -> Recording:
        """Start, or raise."""
        if "start" in self.fails:
            raise RuntimeError("planned")
        return self.recording(destination)

    def recording(self, destination: Destination) -> Recording:
        """Return a recording of this tool."""
        return CountedRecording(type(self), destination)


class BoundTool(CountedTool):
    """Must be stopped on the thread that started it."""

    name = "bound"
    suffix = ".bound.txt"
    any_thread = False


class FirstTool(CountedTool):
    """Starts before another one, and then never fails."""

    name = "first"
    suffix = ".first.txt"

    def start(self, destination: Destination) -> Recording:
        """Start."""
        return self.recording(destination)


class CountedRecording(Recording):
    """Is open until it is stopped or discarded, and is neither twice."""

    def __init__(self, tool: type[CountedTool], destination: Destination) -> None:
        self._tool = tool
        self._destination = destination
        self._thread = threading.get_ident()
        CountedTool.open.append(self)

    def step(self) -> None:
        """Raise, maybe."""
        if CountedTool.fails == "step":
            raise RuntimeError("planned")

    def stop(self) -> list[Output]:
        """Close, and write or raise."""
        if not self._tool.any_thread and threading.get_ident() != self._thread:
            CountedTool.misused.append("stopped on another thread")
        self._close()
        if CountedTool.fails == "stop":
            raise RuntimeError("planned")
        path = self._destination.path(self._tool.suffix)
        path.write_text("recorded")
        artifact = self._destination.artifact(self._tool)
        ok = msgspec.structs.replace(artifact, status="ok", bytes=8)
        if CountedTool.fails == "finish":
            return [Output(msgspec.structs.replace(artifact, status="pending"), _raise)]
        return [Output(ok)]

    def discard(self) -> None:
        """Close, and raise, maybe."""
        self._close()
        if "discard" in CountedTool.fails:
            raise RuntimeError("planned")

    def _close(self) -> None:
        if self in CountedTool.open:
            CountedTool.open.remove(self)
        else:
            CountedTool.misused.append("closed twice")


def _raise() -> Any:
    raise RuntimeError("planned")


ROLES = {
    "actor": {"mode": "e2e", "tool": f"{__name__}:CountedTool"},
    "critic": {"mode": "discrete", "tool": f"{__name__}:CountedTool"},
    "ref": {"mode": "e2e", "tool": f"{__name__}:BoundTool"},
    "reward": {"mode": "discrete", "tool": f"{__name__}:BoundTool"},
    "rollout": {"mode": "discrete", "tool": [f"{__name__}:FirstTool", f"{__name__}:CountedTool"]},
}
RECORDINGS = {role: 2 if role == "rollout" else 1 for role in ROLES}


class SessionMachine(RuleBasedStateMachine):
    """Calls the session, and knows what each call must do."""

    threads: ClassVar[list[ThreadPoolExecutor]] = []

    def __init__(self) -> None:
        super().__init__()
        CountedTool.open.clear()
        CountedTool.misused.clear()
        CountedTool.fails = ""
        if not self.threads:
            self.threads.extend(ThreadPoolExecutor(1) for _ in range(HERE))
        self.folder = Path(tempfile.mkdtemp())
        self.session = Session()
        config = ProfilingConfig.from_any(
            {"enable": True, "tool": "spans", "roles": ROLES, "timeouts": {"stop_s": 0.1, "finish_s": 5}}
        )
        for role in ROLES:
            self.session.register(config, WorkerIdentity(role=role))
        self.number = 0
        self.live: CaptureRequest | None = None
        self.role = ""
        self.owner = 0
        self.last: CaptureResult | None = None
        self.stages: list[list[Stage]] = [[] for _ in range(HERE)]

    @classmethod
    def end_threads(cls) -> None:
        """End the threads that all examples share."""
        while cls.threads:
            cls.threads.pop().shutdown()

    def on(self, thread: int, function: Callable[[], Any]) -> Any:
        """Run a call on one of the threads; one that takes half a minute hangs."""
        return self.threads[thread].submit(function).result(timeout=30)

    def request(self, **more: Any) -> CaptureRequest:
        """Return the request of a new capture."""
        self.number += 1
        folder = str(self.folder / str(self.number))
        return CaptureRequest(
            **{"capture_id": str(self.number), "run_id": "run", "step": 1, "folder": folder, **more}
        )

    @rule(
        thread=THREADS,
        role=st.sampled_from(sorted(ROLES)),
        keep=st.booleans(),
        window=st.booleans(),
        fails=st.one_of(FAULTS, st.just("no folder")),
    )
    def start(self, thread: int, role: str, keep: bool, window: bool, fails: str) -> None:
        """A new capture opens if none is open and its tools can start."""
        CountedTool.fails = fails
        more: dict[str, Any] = {"keep": keep, "stage": "rollout" if window else None}
        if fails == "no folder":
            (self.folder / "file").touch()
            more["folder"] = str(self.folder / "file" / "step")
        request = self.request(**more)
        whole = window or ROLES[role]["mode"] == "e2e"

        def call() -> Any:
            return self.session.start(request, WorkerIdentity(role=role))

        if self.live is not None:
            return  # it would close the open one
        if keep and fails == "no folder":
            with pytest.raises(OSError, match="file"):
                self.on(thread, call)
        elif whole and "start" in CountedTool.fails:
            with pytest.raises(RuntimeError, match="planned"):
                self.on(thread, call)
        else:
            assert self.on(thread, call).status == ("recording" if whole else "armed")
            self.live, self.role, self.owner = request, role, thread

    @precondition(lambda self: self.live is not None)
    @rule(thread=THREADS, role=st.sampled_from(sorted(ROLES)))
    def join(self, thread: int, role: str) -> None:
        """The same request again changes nothing, whoever it is for."""
        reply = self.on(thread, lambda: self.session.start(self.live, WorkerIdentity(role=role)))
        assert (reply.status, reply.identity.role) == ("joined", self.role)

    @rule(thread=THREADS, named=st.sampled_from(["any", "the open one", "the last", "an unknown one"]))
    def stop(self, thread: int, named: str) -> None:
        """The open one ends, the last one is told again, any other is skipped."""
        capture_id = {
            "any": None,
            "the open one": self.live.capture_id if self.live else "0",
            "the last": self.last.capture_id if self.last else "0",
            "an unknown one": "0",
        }[named]
        result = self.on(thread, lambda: self.session.stop(capture_id, 1.0)).result
        if self.live is not None and capture_id in (None, self.live.capture_id):
            self.ended(result, thread)
        elif self.last is not None and capture_id in (None, self.last.capture_id):
            assert result.capture_id == self.last.capture_id
        else:
            assert result.status == "skipped"

    def ended(self, result: CaptureResult, thread: int) -> None:
        """Look at the result of the capture that was open."""
        assert self.live is not None
        assert result.capture_id == self.live.capture_id
        assert len({artifact.path for artifact in result.artifacts}) == len(result.artifacts)
        for artifact in result.artifacts:
            assert artifact.status in ("ok", "failed", "skipped", "pending"), artifact
            assert (artifact.status in ("ok", "pending")) == (artifact.reason == ""), artifact
            if artifact.status == "ok":
                assert (Path(self.live.folder) / artifact.path).read_text() == "recorded"
        for span in result.stages:
            assert span.begin_ns <= span.end_ns
            assert span.depth >= 0
        if not self.live.keep:
            assert (result.status, result.artifacts) == ("skipped", [])
        elif self.role == "actor":
            expected = {"stop": "failed", "finish": "failed"}.get(CountedTool.fails, "ok")
            assert [artifact.status for artifact in result.artifacts] == [expected]
        elif self.role == "ref" and thread != self.owner:
            [artifact] = result.artifacts
            assert "arrived on another thread" in artifact.reason
        self.live, self.last = None, result

    @rule(thread=THREADS, name=STAGES, fails=FAULTS)
    def enter(self, thread: int, name: str, fails: str) -> None:
        """A stage never raises, whatever the tools do from now on."""
        CountedTool.fails = fails
        if len(self.stages[thread]) < 4:
            stage = Stage(self.session, name)
            self.on(thread, stage.__enter__)
            self.stages[thread].append(stage)

    @rule(thread=THREADS, elsewhere=THREADS, which=st.sampled_from([0, -1]), raises=st.booleans())
    def leave(self, thread: int, elsewhere: int, which: int, raises: bool) -> None:
        """Stages end in any order, on any thread."""
        if self.stages[thread]:
            stage = self.stages[thread].pop(which)
            kind = ValueError if raises else None
            self.on(elsewhere if raises else thread, lambda: stage.__exit__(kind, None, None))

    @rule(thread=THREADS)
    def step(self, thread: int) -> None:
        """A mini-batch may end at any time."""
        self.on(thread, self.session.step)

    @rule(
        threads=st.tuples(THREADS, THREADS),
        role=st.sampled_from(sorted(ROLES)),
        window=st.booleans(),
        fails=FAULTS,
        stages=st.lists(st.tuples(THREADS, STAGES, FAULTS, st.booleans()), max_size=6),
    )
    def capture(
        self,
        threads: tuple[int, int],
        role: str,
        window: bool,
        fails: str,
        stages: list[tuple[int, str, str, bool]],
    ) -> None:
        """A whole capture, as a loop makes it: calls at random seldom get this far."""
        self.stop(threads[0], "any")
        self.start(threads[0], role, keep=True, window=window, fails=fails)
        for thread, name, fault, ends in stages:
            self.enter(thread, name, fault)
            if ends:
                self.leave(thread, thread, which=-1, raises=False)
        self.stop(threads[1], "any")

    @rule(
        calls=st.lists(
            st.sampled_from(["start", "join", "stop", "stop another", "stage", "step"]),
            min_size=2,
            max_size=HERE,
        ),
        role=st.sampled_from(sorted(ROLES)),
    )
    def race(self, calls: list[str], role: str) -> None:
        """Calls at the same moment end, and leave a session that can be used."""
        known, together = self.live or self.request(), threading.Barrier(len(calls))
        worker = WorkerIdentity(role=role)

        def stages() -> None:
            for name in ("update_actor", "reward"):
                with Stage(self.session, name):
                    pass

        doing: dict[str, Callable[[], object]] = {
            "start": lambda: self.session.start(self.request(), worker),
            "join": lambda: self.session.start(known, worker),
            "stop": lambda: self.session.stop(None),
            "stop another": lambda: self.session.stop("0"),
            "stage": stages,
            "step": self.session.step,
        }

        def call(name: str) -> None:
            together.wait()
            try:
                doing[name]()
            except (CaptureStateError, RuntimeError):
                if name not in ("start", "join"):
                    raise

        futures = [self.threads[i].submit(call, name) for i, name in enumerate(calls)]
        for future in futures:
            future.result(timeout=30)
        result = self.session.stop(None).result
        self.live, self.last = None, result if result.capture_id else None

    @invariant()
    def is_what_the_model_says(self) -> None:
        """Stages are received while a capture is open; recordings are open while it records."""
        assert CountedTool.misused == []
        assert (self.session.sink is None) == (self.live is None)
        capture = self.session._capture
        if capture is None:
            assert CountedTool.open == []
            return
        records = capture.whole or capture._recorded is not None
        assert len(CountedTool.open) == (RECORDINGS[self.role] if records else 0)
        assert self.live is not None
        assert capture.whole == (self.live.stage is not None or ROLES[self.role]["mode"] == "e2e")

    def teardown(self) -> None:
        """Leaving ends whatever is open."""
        CountedTool.fails = ""
        self.session.leave()
        assert CountedTool.open == []
        assert self.session.sink is None
        atexit.unregister(self.session.leave)
        shutil.rmtree(self.folder)


def test_a_tool_that_cannot_be_discarded_is_not_stopped_with_the_next_stage() -> None:
    """Another tool failed to start; the first one was discarded, raised, and was kept as if it recorded."""
    machine = SessionMachine()
    machine.start(0, "rollout", keep=True, window=False, fails="")
    machine.enter(0, "reward", fails="start, discard")
    machine.leave(0, 0, which=-1, raises=False)
    machine.enter(0, "reward", fails="")
    machine.leave(0, 0, which=-1, raises=False)
    machine.stop(0, "any")
    machine.is_what_the_model_says()
    machine.teardown()
    machine.end_threads()


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(10, 20), pytest.param(1000, 40, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_a_session_does_what_its_model_says(examples: int, steps: int) -> None:
    """Hypothesis prints the calls that lead to a breach, the fewest that it finds."""
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=examples < 100,
        database=None,
        print_blob=True,
    )
    try:
        run_state_machine_as_test(SessionMachine, settings=how)
    finally:
        SessionMachine.end_threads()
