"""What the plugin records of agent loops, around classes that are as verl's, without verl."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import drawn_logs
import pytest

from verl_profiling import ProfilingCallback, ProfilingConfig, span
from verl_profiling.files.trajectory_log import SpanRecord, TrajectoryLog
from verl_profiling.integrations.hooks import noting
from verl_profiling.integrations.verl import trajectories as hooked
from verl_profiling.integrations.verl.profiler import Profiler

INFO = {"step": 3, "sample_index": 5, "rollout_n": 0, "validate": False}
V1_PROMPT = {"uid": "g7", "session_id": 1}


def make_verl() -> SimpleNamespace:
    """Return a module with classes that do what verl's do."""

    class LLMServerClient:
        def __init__(self, *answers: str) -> None:
            self.answers = list(answers) or ["stop"]
            self.sent: list[str] = []

        async def _acquire_server(self, request_id: str) -> str:
            await asyncio.sleep(0)
            return "server"

        def _vllm_request_id(self, request_id: str) -> str:
            return f"{request_id}-{len(self.sent)}"

        async def generate(self, request_id: str) -> Any:
            await self._acquire_server(request_id)
            self.sent.append(self._vllm_request_id(request_id))
            await asyncio.sleep(0.001)
            return SimpleNamespace(stop_reason=self.answers.pop(0))

    class FullyAsyncLLMServerClient(LLMServerClient):
        async def generate(self, request_id: str) -> Any:
            while True:
                output = await super().generate(request_id)
                if output.stop_reason != "aborted":
                    return output
                await asyncio.sleep(0.02)

    class AgentLoopBase:
        async def apply_chat_template(self, messages: list[str]) -> list[int]:
            return [len(messages)]

    class AgentLoopWorker:
        def __init__(self, run: Callable[[], Any]) -> None:
            self.run = run

        async def _run_agent_loop(
            self, sampling_params: Any, trajectory: Any, *, agent_name: str, **prompt: Any
        ) -> Any:
            output = await self.run()
            outputs = output if isinstance(output, list) else [output]
            await self._compute_score(outputs, kwargs=prompt)
            return output

        async def _compute_score(self, outputs: list[Any], kwargs: Any) -> None:
            outputs[-1].reward_score = 0.5

        def _postprocess(self, outputs: list[Any]) -> list[Any]:
            return outputs

    class ToolAgentLoop(AgentLoopBase):
        def __init__(self) -> None:
            self.tools: dict[str, Any] = {"search": object(), "sandbox": object()}

        async def _call_tool(self, tool_call: Any, tools_kwargs: Any, agent_data: Any) -> str:
            tool = self.tools.get(tool_call.name)
            if hasattr(tool, "create"):
                await tool.create()
                await tool.release("id")
            return str(tool_call.name)

    class RewardLoopWorker:
        async def compute_score(self, data: Any) -> dict[str, float]:
            return {"reward_score": 1.0}

    @contextmanager
    def simple_timer(name: str, timing: dict[str, float]) -> Iterator[None]:
        yield
        timing[name] = 1.0

    return SimpleNamespace(__name__="verl", **locals())


@pytest.fixture
def verl() -> SimpleNamespace:
    module = make_verl()
    missing: list[str] = []
    with noting(missing):
        for hook in (
            hooked.hook_clients,
            hooked.hook_agent_loops,
            hooked.hook_tool_loop,
            hooked.hook_simple_timer,
            hooked.hook_reward_loops,
        ):
            hook(module)
    assert missing == []
    return module


def output(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_turns": 2, "prompt_ids": [1, 2], "response_ids": [3], "extra_fields": {}, **fields}
    )


def recorded(*coroutines: Any) -> TrajectoryLog:
    async def all_of_them() -> None:
        await asyncio.gather(*coroutines, return_exceptions=True)

    return drawn_logs.recorded(lambda: asyncio.run(all_of_them()))


def one_trajectory(verl: SimpleNamespace, run: Callable[[], Any], **prompt: Any) -> TrajectoryLog:
    worker = verl.AgentLoopWorker(run)
    return recorded(worker._run_agent_loop({}, INFO, agent_name="own", **(prompt or V1_PROMPT)))


def names(log: TrajectoryLog) -> list[str]:
    return [found.name for found in log.spans]


def named(log: TrajectoryLog, name: str) -> list[SpanRecord]:
    return [found for found in log.spans if found.name == name]


def test_several_outputs_of_one_trajectory_are_added(verl: SimpleNamespace) -> None:
    """A loop may return several: turns and tokens are all of theirs,
    versions from the first to the last.
    """

    async def run() -> Any:
        versions = [{"min_global_steps": n, "max_global_steps": n + 1} for n in (4, 5)]
        return [output(extra_fields=fields) for fields in versions]

    facts = drawn_logs.only(one_trajectory(verl, run)).facts
    assert (facts["turns"], facts["prompt_tokens"], facts["response_tokens"]) == (4, 4, 2)
    assert (facts["min_version"], facts["max_version"]) == (4, 6)


@pytest.mark.parametrize(("limit", "is_truncated"), [(1, True), (2, False)])
def test_task_environment_and_a_response_of_full_length_are_facts(
    verl: SimpleNamespace, limit: int, is_truncated: bool
) -> None:
    """Verl's datasets name the task; a response as long as the limit was cut off."""

    async def run() -> Any:
        return output()

    worker = verl.AgentLoopWorker(run)
    worker.rollout_config = SimpleNamespace(response_length=limit)
    prompt = {**V1_PROMPT, "data_source": "gsm8k", "env_name": "docker", "task": None}
    facts = drawn_logs.only(
        recorded(worker._run_agent_loop({}, INFO, agent_name="own", **prompt))
    ).facts
    assert (facts["task"], facts["environment"]) == ("gsm8k", "docker")
    assert facts["truncated"] is is_truncated


def test_an_aborted_request_that_is_resumed_is_a_pause(verl: SimpleNamespace) -> None:
    """Each attempt is a request of its own, and the wait between them has a name;
    the trajectory is done.
    """
    client = verl.FullyAsyncLLMServerClient("aborted", "aborted", "stop")

    async def run() -> Any:
        await client.generate("r")
        return output()

    log = one_trajectory(verl, run)
    assert [found.request for found in named(log, "generate")] == ["r-0", "r-1", "r-2"]
    pauses = named(log, "wait:resume")
    assert len(pauses) == 2
    assert all(pause.end_ns - pause.begin_ns >= 15_000_000 and not pause.failed for pause in pauses)
    assert drawn_logs.only(log).status == "done"


def test_a_trajectory_whose_last_request_was_aborted_is_aborted(verl: SimpleNamespace) -> None:
    """Its status says so; an abort in an earlier turn is none."""

    def runs(*answers: str) -> Callable[[], Any]:
        client = verl.LLMServerClient(*answers)

        async def run() -> Any:
            for _ in answers:
                await client.generate("r")
            return output()

        return run

    assert drawn_logs.only(one_trajectory(verl, runs("stop", "abort"))).status == "aborted"
    assert drawn_logs.only(one_trajectory(verl, runs("abort", "stop"))).status == "done"


def test_tool_calls_have_the_names_of_tools(verl: SimpleNamespace) -> None:
    """A name that the model made up is a fact of the call, so a million of them are one row."""
    loop = verl.ToolAgentLoop()
    calls = ["search", "search", "x" * 5_000]

    async def run() -> Any:
        asked = [loop._call_tool(SimpleNamespace(name=name), {}, None) for name in calls]
        await asyncio.gather(*asked)
        return output()

    log = one_trajectory(verl, run)
    assert sorted(names(log)) == ["tool:(unknown)", "tool:search", "tool:search"]
    assert len(named(log, "tool:(unknown)")[0].facts["requested"]) == 120  # type: ignore[arg-type]
    assert drawn_logs.only(log).facts["tool_calls"] == 3


def test_the_sandbox_of_a_tool_is_started_and_stopped_inside_its_call(
    verl: SimpleNamespace,
) -> None:
    """However often it, or a tool that inherits from it, is called;
    those of verl's base class do nothing.
    """

    class Sandbox:
        async def create(self) -> None:
            await asyncio.sleep(0)

        async def release(self, instance_id: str) -> None:
            await asyncio.sleep(0)

    class Stateless:
        async def create(self) -> None:
            await asyncio.sleep(0)

        async def release(self, instance_id: str) -> None:
            await asyncio.sleep(0)

        release.__module__ = "verl.tools.base_tool"

    class Own(Sandbox):
        pass

    loop = verl.ToolAgentLoop()
    loop.tools = {"sandbox": Sandbox(), "stateless": Stateless(), "own": Own()}

    async def run() -> Any:
        for name in ("sandbox", "sandbox", "stateless", "own"):
            await loop._call_tool(SimpleNamespace(name=name), {}, None)
        return output()

    call = ["tool:sandbox", "environment:start", "environment:stop"]
    log = one_trajectory(verl, run)
    assert names(log) == [
        *call,
        *call,
        "tool:stateless",
        "environment:start",
        "tool:own",
        *call[1:],
    ]
    assert [log.spans[number].parent for number in (1, 2)] == [log.spans[0].id] * 2


def test_a_custom_loop_gets_spans_by_verls_timers_and_its_own(verl: SimpleNamespace) -> None:
    """Timers have verl's names in a trajectory and none outside;
    a span of the loop's own is inside.
    """
    timing: dict[str, float] = {}

    async def run() -> Any:
        with verl.simple_timer("tool_calls", timing), span("tool:own"):
            await asyncio.sleep(0)
        with verl.simple_timer("compute_score", timing):
            await asyncio.sleep(0)
        return output()

    log = one_trajectory(verl, run)
    assert names(log) == ["tool_calls", "tool:own", "reward"]
    assert log.spans[1].parent == log.spans[0].id
    assert timing == {"tool_calls": 1.0, "compute_score": 1.0}

    async def outside() -> None:
        with verl.simple_timer("generate_sequences", timing):
            await asyncio.sleep(0)

    assert names(recorded(outside())) == []


class Handle:
    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.error = error
        self.init_capture = SimpleNamespace(remote=self._init)

    def _init(self, settings: ProfilingConfig, **given: Any) -> Handle:
        self.told.append(given)
        return self

    def answer(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return ["not recorded: tokenizing"]


def test_actors_that_cannot_be_captured_do_not_end_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A class of one's own without the methods, and a worker that fails,
    are named in every manifest.
    """

    def get(handles: list[Handle]) -> list[list[str]]:
        return [handle.answer() for handle in handles]

    monkeypatch.setattr("ray.get", get)
    callback = ProfilingCallback({"enable": True})
    profiler = Profiler(None, callback.config, callback)
    profiler.add_actors("agent_loop", [Handle(), object()])
    profiler.add_actors("agent_loop", [Handle(RuntimeError("no disk"))])
    lost = "not recorded: the role agent_loop, because"
    assert profiler.misfits[0].startswith(f"{lost} its workers have no capture methods")
    assert profiler.misfits[1] == f"{lost} RuntimeError: no disk"
