"""An engine and a tool that others wrote need one adapter and one line."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from tests.engines.example_adapter import CountingEngine, CountingServer
from verl_profiling import ConfigError, ProfilingCallback, engines
from verl_profiling.cli import main
from verl_profiling.engines import ENGINES, NEWEST_TESTED, adapter_named
from verl_profiling.files.run_files import read_manifest
from verl_profiling.workers import RolloutCaptureMixin

COUNTER = "tests.engines.example_adapter:CounterTool"
ELSEWHERE = "tests.tools.example_tool:CProfileTool"
LOCATION = ENGINES.pop("counting")  # the example's line, for the tests of this module alone


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "counting", LOCATION)


def rolled_out(config: Any, servers: list[CountingServer], tokens: list[int]) -> None:
    """Run one step per number of tokens, in which each server answers prompts of growing length."""
    with ProfilingCallback(config) as callback:
        callback.add_rollout(servers)
        for step, new_tokens in enumerate(tokens, 1):
            callback.on_step_begin(step)
            callback.on_rollout_begin()
            for prompts, server in enumerate(servers, 1):
                server.engine.generate([[1] * n for n in range(1, prompts + 1)], new_tokens)
            callback.on_rollout_end()
            callback.on_step_end()


@pytest.mark.parametrize("seed", range(24))
def test_each_rank_of_a_registered_engine_has_its_artifact(seed: int, tmp_path: Path) -> None:
    """Replicas and ranks as drawn: canonical names, what each rank wrote, and all requests."""
    draw = random.Random(seed)
    ranks, every = draw.randint(1, 4), draw.randint(1, 2)
    replicas, steps = draw.randint(1, 3), draw.randint(1, 3)
    mode = draw.choice(("e2e", "discrete"))
    tokens = [draw.randint(2, 50) for _ in range(steps)]
    chosen = sorted(draw.sample(range(ranks * replicas), draw.randint(1, ranks * replicas)))
    config = settings(
        save_path=str(tmp_path),
        mode=mode,
        select={"ranks": chosen},
        roles={"rollout": {"tool": COUNTER, "tools": {COUNTER: {"every": every}}}},
        schedule={"steps": list(range(1, steps + 1))},
    )
    rolled_out(config, [CountingServer(config, n, ranks) for n in range(replicas)], tokens)
    part = ".rollout" if mode == "discrete" else ""
    for step, new_tokens in enumerate(tokens, 1):
        folder = tmp_path / f"step_{step:06d}"
        written = {path.name: path.read_text() for path in folder.glob("*.count.txt")}
        assert written == {
            f"rollout{rank // ranks}_rank{rank % ranks}{part}.count.txt": f"{new_tokens // every}\n"
            for rank in chosen
        }
        for worker in read_manifest(folder).workers:
            recorded = [rank for rank in chosen if rank // ranks == worker.identity.replica]
            assert (worker.status, len(worker.artifacts)) == (
                "ok" if recorded else "skipped",
                len(recorded),
            )
            if recorded:
                lengths = [(one.prompt_tokens, one.response_tokens) for one in worker.requests]
                prompts = range(1, worker.identity.replica + 2)
                assert lengths == [(prompt, new_tokens) for prompt in prompts]
    assert not list(tmp_path.glob(".engines/*"))


@pytest.mark.parametrize(
    ("tool", "options", "key", "why"),
    [
        ("torch", {}, "roles.rollout.tool", "do not record with torch; set the tool to counter"),
        (
            ELSEWHERE,
            {},
            "roles.rollout.tool",
            "do not record with cprofile; set the tool to counter",
        ),
        (
            COUNTER,
            {"every": 3},
            f"tools.{COUNTER}.every",
            f"set roles.rollout.tools.{COUNTER}.every=1",
        ),
    ],
)
def test_what_an_engine_does_not_record_is_refused(
    tool: str, options: dict[str, Any], key: str, why: str
) -> None:
    """A tool that the engine lacks, one that says nothing of engines, and a value that it lacks."""
    config = settings(roles={"rollout": {"tool": tool, "tools": {tool: options}}})
    with pytest.raises(ConfigError, match=why) as caught:
        CountingServer(config, 0, 2)
    assert caught.value.key == key


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("tool", [COUNTER, ELSEWHERE])
def test_our_engines_refuse_the_tools_of_others(engine: str, tool: str) -> None:
    """By name, with the tools that they record with, before an engine is started."""
    with pytest.raises(ConfigError, match=r"do not record with c\w+; set the tool to torch"):
        adapter_named(engine).tool_of(settings(tool=tool).for_role("rollout"))


def test_a_registered_engine_is_known_by_name(tmp_path: Path) -> None:
    """It needs no argument to be captured; one that is not registered is unknown as before."""
    assert RolloutCaptureMixin.engine_args(settings(), engine="counting") == {}
    with pytest.raises(ConfigError, match="choose from: counting, sglang, transformers, vllm"):
        RolloutCaptureMixin.engine_args(settings(), engine="other")
    server = CountingServer(settings(tool="spans", save_path=str(tmp_path)), 0, 1)
    assert isinstance(server.engine, CountingEngine)


def test_a_requested_capture_of_spans_has_the_requests(tmp_path: Path) -> None:
    """The engine's profiler, which records another tool, is not started."""
    watch = {"enable": True}
    config = settings(save_path=str(tmp_path), tool=COUNTER, schedule={"steps": []}, watch=watch)
    server = CountingServer(config, 0, 1)
    with ProfilingCallback(config) as callback:
        callback.add_rollout(server)
        for step in (1, 2):
            callback.on_step_begin(step)
            callback.on_rollout_begin()
            server.engine.generate([[1, 2]], 5)
            callback.on_rollout_end()
            callback.on_step_end()
            if step == 1:
                assert main(["trigger", str(tmp_path), "--tools", "spans"]) == 0
    [worker] = read_manifest(tmp_path / "step_000002").workers
    assert (worker.status, worker.tools, worker.artifacts) == ("ok", ["spans"], [])
    assert [one.response_tokens for one in worker.requests] == [5]
    assert not list(tmp_path.glob(".engines/*"))


def moved(config: Any) -> CountingServer:
    """Return a server whose engine no longer has what its adapter reads."""
    server = CountingServer({"enable": False}, 0, 1)
    del server.engine.ranks
    server.init_capture(config, replica=0)
    return server


def test_an_engine_whose_api_has_moved_is_recorded_by_its_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning and each manifest say what is missing; strict settings raise."""
    config = settings(save_path=str(tmp_path), tool=COUNTER, schedule={"steps": [1]})
    rolled_out(config, [moved(config)], [5])
    said = "rollout0: only requests are recorded: the API of Counting has moved (AttributeError: "
    assert caplog.text.count(said) == 1
    [worker] = read_manifest(tmp_path / "step_000001").workers
    assert len(worker.requests) == 1
    assert [note for note in worker.notes if said in note]
    with pytest.raises(AttributeError, match="ranks"):
        moved(dataclasses.replace(config, strict=True))


def test_an_engine_newer_than_all_that_were_tested_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded as usual; the adapter's module has the name of its package."""
    monkeypatch.setattr(engines, "installed_version", lambda _: "2.0.1")
    monkeypatch.setitem(NEWEST_TESTED, "example_adapter", "2.0.0")
    config = settings(save_path=str(tmp_path), tool=COUNTER, schedule={"steps": [1]})
    rolled_out(config, [CountingServer(config, replica, 1) for replica in range(2)], [5])
    assert caplog.text.count("example_adapter 2.0.1 is newer than 2.0.0, the newest that was") == 1
    assert [one.status for one in read_manifest(tmp_path / "step_000001").workers] == ["ok"] * 2
