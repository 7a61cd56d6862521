"""One capture that differs from the settings: what it asks of a role,
of a session and of an engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from example_loops import request, settings

from verl_profiling import ConfigError, stage, trajectory
from verl_profiling.capture.session import Session
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.engines.replica import make_recorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.roles import RoleConfig
from verl_profiling.workers import RewardCaptureMixin

ACTOR = WorkerIdentity(role="actor")


def names(role: RoleConfig) -> list[str]:
    return [tool.name for tool in role.tools]


def test_an_aim_takes_the_place_of_what_it_names() -> None:
    """All else is as the settings say; stages mean discrete mode and leave engines out."""
    config = settings(
        mode="e2e",
        select={"roles": ["actor"], "ranks": "0", "stages": ["update_actor"]},
        roles={"ref": {"enable": False, "mode": "e2e", "tool": "spans", "ranks": "7", "pp": [0]}},
    )
    selection = CaptureSelection(
        mode="discrete",
        tools=("torch_memory",),
        roles=("ref",),
        ranks=(3,),
        stages=("ref_log_prob",),
    )
    ref = config.for_role("ref", selection)
    assert (ref.enable, ref.mode, names(ref), ref.stages) == (
        True,
        "discrete",
        ["torch_memory"],
        {"ref_log_prob"},
    )
    assert ref.selects(3, topology={"pp": 1})
    assert not ref.selects(7)
    assert not config.for_role("actor", selection).enable
    assert not config.for_role("ref").enable
    assert config.for_role("actor").selects(0)
    assert config.for_role("ref", selection) is ref, "computed once"
    config = settings(select={"roles": ["actor"], "ranks": "1"}, tool="spans")
    assert config.for_role("actor", CaptureSelection(mode="discrete")).ranks == {1}
    assert names(config.for_role("actor", CaptureSelection(ranks=(2,)))) == ["spans"]
    assert not config.for_role("critic", CaptureSelection(ranks=(2,))).enable
    config = settings(tool="spans")
    assert config.for_role("actor", CaptureSelection(stages=("update_actor",))).mode == "discrete"
    assert not config.for_role("rollout", CaptureSelection(stages=("update_actor",))).enable
    assert config.for_role("rollout", CaptureSelection(stages=("rollout",))).enable
    with pytest.raises(ConfigError, match="discrete mode"):
        config.for_role("actor", CaptureSelection(stages=("update_actor",), mode="e2e"))
    assert (
        CaptureSelection(mode="e2e", ranks=(0, 3), roles=("actor",)).in_words()
        == "mode=e2e, roles=actor, ranks=0,3"
    )
    assert CaptureSelection().in_words() == ""


def test_replicas_are_those_of_the_rollout_and_ranks_those_of_the_others() -> None:
    """So that one capture can be aimed at a rank and at an engine."""
    config, selection = settings(select={"ranks": "0"}), CaptureSelection(ranks=(3,), replicas=(1,))
    assert config.for_role("rollout", selection).selects(9, replica=1)
    assert not config.for_role("rollout", selection).selects(3, replica=0)
    assert config.for_role("actor", selection).selects(3)
    assert config.for_role("actor", CaptureSelection(replicas=(1,))).selects(0)
    assert not config.for_role("actor", CaptureSelection(replicas=(1,))).selects(1)
    assert config.for_role("rollout", CaptureSelection(ranks=(3,))).selects(3, replica=0)


def test_trajectories_go_on_unless_their_role_is_named() -> None:
    """A process of agent loops gets no profiler because somebody asks for one of the ranks."""
    config = settings(tool="spans").with_trajectories("agent_loop")
    selection = CaptureSelection(tools=("torch",), mode="discrete")
    kept = config.for_role("agent_loop", selection)
    assert (names(kept), kept.mode) == (["trajectories"], "e2e")
    named = config.for_role("agent_loop", CaptureSelection(tools=("torch",), roles=("agent_loop",)))
    assert names(named) == ["torch", "trajectories"]


def test_a_role_that_was_switched_off_records_when_it_is_asked_for(
    session: Session, tmp_path: Path
) -> None:
    """And one that is on does not, when another is."""
    session.register(settings(tool="spans", select={"roles": ["critic"]}), ACTOR)
    assert (
        session.start(
            request(tmp_path, 1, selection=CaptureSelection(roles=("actor",))), ACTOR
        ).status
        == "recording"
    )
    session.stop()
    other = session.start(
        request(tmp_path, 2, selection=CaptureSelection(roles=("critic",))), ACTOR
    )
    assert (other.status, other.reason) == ("skipped", "not requested")


def test_a_capture_aimed_at_what_runs_side_by_side_is_of_the_whole_step(
    session: Session, tmp_path: Path
) -> None:
    """The watch names it as it names a stage, but no window opens with it;
    a stage of the process is one.
    """
    worker = RewardCaptureMixin()
    worker.init_capture(settings(watch={"enable": True}))
    busy = session.busy("reward")
    found = []
    for number, name in enumerate(("reward", "update_actor")):
        selection = CaptureSelection(mode="discrete", roles=("reward",), stages=(name,))
        worker.start_capture(request(tmp_path, number, selection=selection))
        with busy, stage("update_actor"), trajectory(group="a", sample=1):
            pass
        result = worker.stop_capture(f"run-{number}").result
        found.append((result.status, result.mode, len(result.artifacts) > 0))
    assert found == [("ok", "e2e", True), ("ok", "discrete", True)]


def test_a_server_records_no_engine_that_computes_elsewhere(
    session: Session, tmp_path: Path
) -> None:
    """An engine that was started to write no trace has none, whatever is asked."""
    who, url = WorkerIdentity(role="rollout", replica=0), "http://127.0.0.1:1"
    recorder = make_recorder(url, settings(tool="spans"), who, requests=RequestLog())
    refused = asyncio.run(
        recorder.start_capture(request(tmp_path, 1, selection=CaptureSelection(tools=("torch",))))
    )
    assert (refused.status, "SGLang was started to write no trace" in refused.reason) == (
        "refused",
        True,
    )
    assert session.sink is None
