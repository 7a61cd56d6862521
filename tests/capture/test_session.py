"""The session: one recorder slot per process,
and everything that may be asked of it in any state.
"""

from __future__ import annotations

import contextvars
import json
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from example_loops import read_trace, request, settings, spans, train

from verl_profiling import span, stage
from verl_profiling.capture.session import Session
from verl_profiling.capture.stage_spans import Stage
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.testing import record_step

ACTOR = WorkerIdentity(role="actor")
CRITIC = WorkerIdentity(role="critic")


@pytest.fixture
def spans_only(session: Session) -> Session:
    """A session with an actor and a critic that record their stages, in e2e mode."""
    for identity in (ACTOR, CRITIC):
        session.register(settings(tool="spans"), identity)
    return session


def test_a_capture_goes_from_start_to_stop(spans_only: Session, tmp_path: Path) -> None:
    """Both answers name worker and capture, and carry clock readings in order."""
    started = spans_only.start(request(tmp_path / "step"), ACTOR)
    with stage("update_actor"):
        pass
    stopped = spans_only.stop("run-1")
    assert (started.status, started.identity) == ("recording", ACTOR)
    result = stopped.result
    assert (result.identity, result.capture_id, result.step) == (ACTOR, "run-1", 1)
    assert (result.mode, result.status) == ("e2e", "ok")
    assert [span.name for span in result.stages] == ["update_actor"]
    times = [
        started.received_ns,
        result.anchors[0].unix_ns,
        started.replied_ns,
        result.stages[0].begin_ns,
        result.stages[0].end_ns,
        stopped.received_ns,
        result.anchors[1].unix_ns,
        stopped.replied_ns,
    ]
    assert times == sorted(times)
    assert (tmp_path / "step").is_dir()


def test_stopping_another_capture_leaves_the_open_one_alone(
    spans_only: Session, tmp_path: Path
) -> None:
    """A stop that comes too late for its own capture must not end the next one."""
    spans_only.start(request(tmp_path, 1), ACTOR)
    spans_only.stop("run-1")
    spans_only.start(request(tmp_path, 2), ACTOR)
    late = spans_only.stop("run-0").result
    assert late.status == "skipped"
    assert "capture run-2 is open" in late.reason
    assert spans_only.stop("run-1").result.capture_id == "run-1"
    assert spans_only.stop("run-2").result.status == "ok"


def test_another_capture_closes_the_open_one(spans_only: Session, tmp_path: Path) -> None:
    """Its loop has forgotten it: its result on disk is a failure,
    and says that nobody stopped it.
    """
    spans_only.start(request(tmp_path, 11), ACTOR)
    with stage("update_actor"):
        pass
    assert spans_only.start(request(tmp_path / "next", 12), ACTOR).status == "recording"
    left = json.loads((tmp_path / "actor_rank0.result.json").read_text())
    assert (left["status"], left["reason"], left["step"]) == ("failed", "never stopped", 11)
    assert [span["name"] for span in left["stages"]] == ["update_actor"]
    assert spans_only.stop("run-12").result.status == "ok"


def test_a_start_that_is_refused_closes_a_forgotten_capture(
    spans_only: Session, tmp_path: Path
) -> None:
    spans_only.start(request(tmp_path / "1"), ACTOR)
    refused = spans_only.start(
        request(tmp_path / "2", 2, selection=CaptureSelection(tools=("tporch",))), ACTOR
    )
    assert (refused.status, spans_only.recording) == ("refused", False)


@pytest.mark.parametrize(
    ("mode", "inside", "status"),
    [("e2e", False, "recording"), ("discrete", False, "armed"), ("discrete", True, "armed")],
)
def test_every_call_has_an_answer_in_every_state(
    session: Session, tmp_path: Path, mode: str, inside: bool, status: str
) -> None:
    """Idle, armed or recording: start, start again, start another, stop."""
    session.register(settings(tool="spans", mode=mode), ACTOR)
    assert session.stop("run-1").result.status == "skipped"
    assert session.start(request(tmp_path), ACTOR).status == status
    with stage("update_actor") if inside else nullcontext():
        assert session.start(request(tmp_path), ACTOR).status == "joined"
        assert session.start(request(tmp_path, 2), ACTOR).status == status
    with stage("update_actor") if inside else nullcontext():
        assert session.stop("run-2").result.status == "ok"


def test_discrete_mode_records_each_stage_apart(tmp_path: Path) -> None:
    """One artifact for each run of each outermost stage; the tool starts and stops around it."""
    with record_step(settings(mode="discrete"), tmp_path) as recorded:
        assert recorded.started.status == "armed"
        train()
        for _ in range(2):
            with stage("update_actor"), stage("inner"):
                train()
        with stage("ref_log_prob"):
            train()
    assert [(a.path, a.stage, a.occurrence, a.status) for a in recorded.result.artifacts] == [
        ("actor_rank0.update_actor.torch.json.gz", "update_actor", 1, "ok"),
        ("actor_rank0.update_actor.2.torch.json.gz", "update_actor", 2, "ok"),
        ("actor_rank0.ref_log_prob.torch.json.gz", "ref_log_prob", 1, "ok"),
    ]
    result = recorded.result
    assert [(span.name, span.stage) for span in result.tool_spans] == [
        (name, artifact.stage) for artifact in result.artifacts for name in ("start", "stop")
    ]
    assert result.cost_s("start") > 0 < result.cost_s("stop")
    outermost = [one for one in result.stages if one.depth == 0]
    starts, stops = result.tool_spans[::2], result.tool_spans[1::2]
    for artifact, own, start, stop in zip(result.artifacts, outermost, starts, stops, strict=True):
        names = {event["name"] for event in spans(tmp_path / artifact.path)}
        assert "aten::addmm" in names
        assert artifact.stage in names
        assert ("inner" in names) == (artifact.stage == "update_actor")
        assert artifact.begin_ns <= own.begin_ns <= own.end_ns <= artifact.end_ns
        assert (
            start.begin_ns
            <= start.end_ns
            <= own.begin_ns
            <= own.end_ns
            <= stop.begin_ns
            <= stop.end_ns
        )


def test_discrete_mode_records_only_selected_stages(tmp_path: Path) -> None:
    """Inside of others, too; all are spans of the result, which is empty if none of them ran."""
    config = settings(mode="discrete", select={"stages": ["update_actor"]})
    with record_step(config, tmp_path) as recorded:
        with stage("rollout"):
            train()
        with stage("fit"), stage("update_actor"):
            train()
    assert [artifact.stage for artifact in recorded.result.artifacts] == ["update_actor"]
    assert [span.name for span in recorded.result.stages] == ["rollout", "fit", "update_actor"]
    with record_step(config, tmp_path) as recorded, stage("rollout"):
        pass
    assert recorded.result.status == "empty"
    assert recorded.result.reason == "no selected stage ran (selected: update_actor; ran: rollout)"


def test_discrete_stages_of_two_tasks_do_not_cut_each_other_short(tmp_path: Path) -> None:
    """The recording ends with the stage that began it, not with another one of the same name."""
    import asyncio

    async def both() -> int:
        begun, second_ended = asyncio.Event(), asyncio.Event()

        @stage("generate")
        async def first() -> None:
            begun.set()
            await second_ended.wait()

        @stage("generate")
        async def second() -> None:
            await begun.wait()

        task = asyncio.create_task(first())
        await begun.wait()
        await second()
        ended_ns = time.time_ns()
        second_ended.set()
        await task
        return ended_ns

    with record_step(settings(mode="discrete"), tmp_path) as recorded:
        second_ended_ns = asyncio.run(both())
    [artifact] = recorded.result.artifacts
    assert artifact.begin_ns < second_ended_ns <= artifact.end_ns


@pytest.mark.parametrize("memory", [False, True])
def test_a_stop_on_another_thread_keeps_the_trace(
    session: Session, tmp_path: Path, memory: bool
) -> None:
    """As Ray's rotating threads do; with ``memory:
    true`` the next stage of the first thread stops.
    """
    session.register(settings(tools={"torch": {"memory": memory}}), ACTOR)
    session.start(request(tmp_path), ACTOR)
    with stage("update_actor"):
        train()
    result: list[CaptureResult] = []
    stopper = threading.Thread(target=lambda: result.append(session.stop("run-1", 30).result))
    stopper.start()
    while stopper.is_alive():
        with stage("update_actor"):
            train()
        time.sleep(0.01)
    stopper.join()
    assert result[0].status == "ok", result[0].reason
    names = {
        event["name"] for event in read_trace(tmp_path / "actor_rank0.torch.json.gz")["traceEvents"]
    }
    assert "aten::addmm" in names
    assert ("[memory]" in names) == memory


@pytest.mark.parametrize("ended", [False, True])
def test_a_hand_over_that_never_comes_fails_and_the_next_capture_works(
    session: Session, tmp_path: Path, ended: bool
) -> None:
    """A thread that passes no stage loses its recording; one that has ended,
    whose id is reused, at once.
    """
    config = settings(tools={"torch": {"memory": True}}, timeouts={"stop_s": 60 if ended else 1})
    session.register(config, ACTOR)
    started, leave = threading.Event(), threading.Event()
    results: list[CaptureResult] = []

    def own() -> None:
        session.start(request(tmp_path), ACTOR)
        started.set()
        assert ended or leave.wait(60)

    owner = threading.Thread(target=own)
    owner.start()
    started.wait()
    if ended:
        owner.join()
    begin_s = time.monotonic()
    stopper = threading.Thread(target=lambda: results.append(session.stop("run-1").result))
    stopper.start()
    stopper.join()
    leave.set()
    owner.join()
    assert time.monotonic() - begin_s < 15
    [result] = results
    assert result.status == "failed"
    assert "arrived on another thread than the one that started recording" in result.reason
    assert [artifact.status for artifact in result.artifacts] == ["failed"]
    with record_step(settings(), tmp_path / "next") as recorded:
        train()
    assert recorded.result.status == "ok", recorded.result.reason


LEAVING = """
    import sys, threading
    from pathlib import Path
    from example_loops import settings, train
    from verl_profiling import stage
    from verl_profiling.testing import record_step

    folder = Path(sys.argv[1])
    config = settings(mode=sys.argv[2], tools={"torch": {"memory": sys.argv[3] == "memory"}})
    open_capture = record_step(config, folder)
    open_capture.__enter__()
    open_stage = stage("update_actor")
    open_stage.__enter__()
    train()
    sys.exit(0)
"""


@pytest.mark.parametrize(("mode", "memory"), [("discrete", "-"), ("e2e", "memory")])
def test_leaving_the_process_keeps_what_was_recorded(
    tmp_path: Path, run_python: Any, mode: str, memory: str
) -> None:
    """``sys.exit`` while recording stops the capture first: no crash, and a whole trace."""
    run_python(LEAVING, tmp_path / "step", mode, memory)
    name = (
        "actor_rank0.torch.json.gz" if mode == "e2e" else "actor_rank0.update_actor.torch.json.gz"
    )
    assert {path.name for path in (tmp_path / "step").iterdir()} == {
        name,
        "actor_rank0.result.json",
    }
    assert spans(tmp_path / "step" / name, "aten::addmm")


def test_a_forked_child_records_nothing_and_harms_nothing(session: Session, tmp_path: Path) -> None:
    """No stage, no span, nothing for the watch; the parent's capture goes on."""
    session.register(settings(tool="trajectories", watch={"enable": True}), ACTOR)
    session.start(request(tmp_path), ACTOR)
    child = os.fork()
    if child == 0:
        with stage("in the child"):
            pass
        nothing = session.sink is None is session.sums and session.stop().result.status == "skipped"
        os._exit(0 if nothing and span("idle") is span("again") else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with stage("in the parent"):
        pass
    assert [span.name for span in session.stop("run-1").result.stages] == ["in the parent"]


def test_a_recorded_stage_may_end_on_another_thread(session: Session, tmp_path: Path) -> None:
    """``asyncio.to_thread`` carries the stage along: its recording ends with it,
    and the next is made.
    """
    session.register(settings(tool="torch", mode="discrete"), ACTOR)
    session.start(request(tmp_path), ACTOR)
    first = Stage(session, "update_actor")
    first.__enter__()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(first.__exit__, None, None, None))
    thread.start()
    thread.join()
    with Stage(session, "reward"), Stage(session, "inside"):
        pass
    result = session.stop("run-1", 30).result
    assert [artifact.stage for artifact in result.artifacts] == ["update_actor", "reward"]
    assert {artifact.status for artifact in result.artifacts} <= {"ok", "pending"}


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_a_worker_without_free_space_skips_its_artifacts(
    tmp_path: Path, session: Session, mode: str
) -> None:
    """Nothing is written; the reason names the folder, what is free there, and the limit.
    Stages are kept.
    """
    limits = {"min_free_bytes": "5000TB"}
    with (
        record_step(settings(mode=mode, limits=limits), tmp_path) as recorded,
        stage("update_actor"),
    ):
        pass
    [artifact] = recorded.result.artifacts
    assert (recorded.result.status, artifact.status) == ("skipped", "skipped")
    assert artifact.reason == recorded.result.reason
    assert artifact.reason.startswith(f"{tmp_path} has ")
    assert artifact.reason.endswith("of free space, less than limits.min_free_bytes=5,000 TB")
    assert [span.name for span in recorded.result.stages] == ["update_actor"]
    assert [path.name for path in tmp_path.iterdir()] == ["actor_rank0.result.json"]
