"""Records trajectories of verl's agent loops, their requests and rewards, with hooks for any agent
loop.

A custom agent loop needs no change, because hooks are in its worker, in verl's client of the
engines, and in verl's timers. Spans of an agent loop lie inside the trajectory that the worker
runs. Each turn is one request. The span in which a task sends it has the request's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from numbers import Integral, Real
from typing import Any

from verl_profiling.capture.session import process_session
from verl_profiling.integrations.hooks import mark, wrap
from verl_profiling.integrations.verl.stage_names import ENVIRONMENT_KEYS, TASK_KEYS
from verl_profiling.integrations.verl.workers import AGENT_LOOP, REWARD, add_actor_methods
from verl_profiling.trajectories import current_trajectory, span, trajectory
from verl_profiling.trajectories.spans import current_span

_TOKENIZING = (
    "ct_build_initial_tokens",
    "ct_merge_context_msg",  # verl 0.9.1
    "ct_merge_non_assistant_msg",  # verl 0.9.0
    "ct_merge_assistant_token",
    "apply_chat_template",  # verl 0.9.0
)
_TIMERS = {"compute_score": "reward"}
_UNKNOWN_TOOL = "tool:(unknown)"
_LONGEST_NAME = 120  # the model writes the name of a tool, so it may be any text
_STARTS_NOTHING = "verl.tools.base_tool"
"""Module of the base class of tools. Its ``create`` and ``release`` start
and stop no environment.
"""
_ABORTED = ("aborted", "abort")

_pause: ContextVar[ExitStack | None] = ContextVar("verl_profiling_pause", default=None)
"""Holds the span ``wait:resume`` between an aborted request and the request that resumes it."""
_hooked: set[Callable[..., Any]] = set()
"""Hooked methods of tools; the class of a tool, of verl or of users, is hooked at its first use."""


def hook_agent_loops(module: Any) -> None:
    """Record the trajectories of ``AgentLoopWorker`` and its subclasses, e.g.
    that of verl's V1 trainer.
    """
    worker, loop = module.AgentLoopWorker, module.AgentLoopBase
    add_actor_methods(worker, AGENT_LOOP)
    wrap(worker, "_run_agent_loop", _as_trajectory)
    wrap(worker, "_compute_score", _described)
    mark(worker, "_postprocess", partial(span, "collate"))
    for name in _TOKENIZING:
        if hasattr(loop, name):
            mark(loop, name, partial(span, "tokenize"))


def hook_tool_loop(module: Any) -> None:
    """Record each tool call of ``ToolAgentLoop`` by name, and the start of a tool's environment."""
    wrap(module.ToolAgentLoop, "_call_tool", _as_tool)


def hook_simple_timer(module: Any) -> None:
    """Record verl's timers in a trajectory as spans of the same name."""
    wrap(module, "simple_timer", _timed)


def hook_clients(module: Any) -> None:
    """Record the requests of ``LLMServerClient``, and of clients that resume aborted requests."""
    wrap(module.LLMServerClient, "generate", _as_request)
    wrap(module.LLMServerClient, "_vllm_request_id", _noted_id)
    mark(module.LLMServerClient, "_acquire_server", partial(span, "wait:server"))
    resuming = getattr(module, "FullyAsyncLLMServerClient", None)
    if resuming is not None and "generate" in vars(resuming):
        wrap(resuming, "generate", _with_pauses)


def hook_reward_loops(module: Any) -> None:
    """Record the scoring of ``RewardLoopWorker``."""
    add_actor_methods(module.RewardLoopWorker, REWARD)
    wrap(module.RewardLoopWorker, "compute_score", _scored)


async def _as_trajectory(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    info = kwargs.get("trajectory", args[2] if len(args) > 2 else {})
    with (
        process_session().busy("trajectories") or nullcontext(),
        trajectory(**_identity(info, kwargs)),
    ):
        return await run(*args, **kwargs)


def _identity(info: Mapping[str, Any], prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return group, sample and facts of a trajectory.

    The sample is the ``session_id`` of verl's V1 trainer, and the ``rollout_n`` of V0.
    """
    return {
        "group": str(prompt.get("uid", info.get("sample_index", ""))),
        "sample": _integer(prompt.get("session_id", info.get("rollout_n"))),
        "validate": bool(info.get("validate")),
        "step": _integer(info.get("step")),
        **_named("task", TASK_KEYS, prompt),
        **_named("environment", ENVIRONMENT_KEYS, prompt),
    }


def _named(fact: str, keys: Sequence[str], prompt: Mapping[str, Any]) -> dict[str, str]:
    """Return the first text under these keys of a prompt as a fact, if there is one."""
    for key in keys:
        if isinstance(prompt.get(key), str):
            return {fact: prompt[key]}
    return {}


async def _described(
    score: Callable[..., Any], self: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Add facts of the outputs, and the reward, to the trajectory of any agent loop."""
    running = current_trajectory()
    if running is None:
        return await score(self, outputs, *args, **kwargs)
    running.add(**_facts(outputs))
    limit = getattr(getattr(self, "rollout_config", None), "response_length", None)
    if outputs and limit:  # as verl's response_length/clip_ratio counts
        running.add(truncated=len(outputs[-1].response_ids) >= limit)
    result = await score(self, outputs, *args, **kwargs)
    reward = getattr(outputs[-1], "reward_score", None) if outputs else None
    if type(reward) is float or isinstance(reward, Real):
        running.add(reward=float(reward))
    return result


def _facts(outputs: Sequence[Any]) -> dict[str, Any]:
    """Return facts of the outputs of one trajectory; most agent loops return one output."""
    facts = {
        "turns": sum(_integer(getattr(output, "num_turns", 0)) or 0 for output in outputs),
        "prompt_tokens": sum(len(getattr(output, "prompt_ids", ())) for output in outputs),
        "response_tokens": sum(len(getattr(output, "response_ids", ())) for output in outputs),
    }
    first = _versions(outputs, "min_global_steps")
    last = _versions(outputs, "max_global_steps")
    if first and last:
        facts.update(min_version=min(first), max_version=max(last))
    return facts


def _versions(outputs: Sequence[Any], field: str) -> list[int]:
    values = [(getattr(output, "extra_fields", None) or {}).get(field) for output in outputs]
    return [version for version in map(_integer, values) if version is not None]


def _integer(value: Any) -> int | None:
    if type(value) is int:  # nearly always; isinstance with the abstract class is ten times slower
        return value
    return int(value) if isinstance(value, Integral) else None


async def _as_tool(
    call: Callable[..., Any],
    self: Any,
    tool_call: Any,
    tools_kwargs: Any,
    agent_data: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    tool = str(getattr(tool_call, "name", ""))[:_LONGEST_NAME]
    if (running := current_trajectory()) is not None:
        running.add(tool_calls=running.facts.get("tool_calls", 0) + 1)
    # A model may request any name; only existing tools have a span name of their own.
    tools = getattr(agent_data, "_active_tools", None) or getattr(self, "tools", {})
    if tool in tools:
        _prepare_tool(type(tools[tool]))
    opened = span(f"tool:{tool}") if tool in tools else span(_UNKNOWN_TOOL, requested=tool)
    with opened:
        return await call(self, tool_call, tools_kwargs, agent_data, *args, **kwargs)


def _prepare_tool(tool_class: type[Any]) -> None:
    """Hook ``create`` and ``release`` of a tool class,
    the start and stop of an environment or a sandbox.
    """
    for name, spanned in (("create", "environment:start"), ("release", "environment:stop")):
        method = getattr(tool_class, name, None)  # perhaps of a hooked base class
        if method is not None and method not in _hooked and method.__module__ != _STARTS_NOTHING:
            mark(tool_class, name, partial(span, spanned))
            _hooked.add(getattr(tool_class, name))


@contextmanager
def _timed(
    simple_timer: Callable[..., Any], name: str, *args: Any, **kwargs: Any
) -> Iterator[None]:
    opened = nullcontext() if current_trajectory() is None else span(_TIMERS.get(name, name))
    with simple_timer(name, *args, **kwargs), opened:
        yield


async def _as_request(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    pause = _pause.get()
    if pause is not None:
        pause.close()
    with span("generate"):
        output = await generate(*args, **kwargs)
    aborted = getattr(output, "stop_reason", None) in _ABORTED
    if aborted and pause is not None:
        pause.enter_context(span("wait:resume"))
    running = current_trajectory()  # a trajectory is aborted if its last request was
    if running is not None and (aborted or running.status == "aborted"):
        running.status = "aborted" if aborted else ""
    return output


async def _with_pauses(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record the pause between a request that a weight update aborted and the request
    that resumes it.
    """
    with ExitStack() as pause:
        token = _pause.set(pause)
        try:
            return await generate(*args, **kwargs)
        finally:
            _pause.reset(token)


def _noted_id(make_id: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    made = make_id(*args, **kwargs)
    if (request := current_span()) is not None:
        request.request = str(made)
    return made


async def _scored(
    compute_score: Callable[..., Any], self: Any, data: Any, *args: Any, **kwargs: Any
) -> Any:
    with process_session().busy("reward") or nullcontext(), span("reward", **_sample_of(data)):
        return await compute_score(self, data, *args, **kwargs)


def _sample_of(data: Any) -> dict[str, Any]:
    """Return group and sample of the scored trajectory, if they are in the batch."""
    columns = getattr(data, "non_tensor_batch", None) or {}
    sample = {}
    for fact, name in (("group", "uid"), ("sample", "session_id")):
        column = columns.get(name)
        if column is not None and len(column):
            value = column[-1]
            sample[fact] = value.item() if hasattr(value, "item") else value
    return sample
