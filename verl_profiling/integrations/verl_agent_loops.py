"""Trajectories of verl's agent loops, by spans around what every loop goes through.

A custom agent loop needs no change: its worker, verl's client for the engines and verl's timers are hooked,
and its own :func:`verl_profiling.span` is inside of the trajectory that the worker runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Integral, Real
from typing import Any

from verl_profiling.capture.session import process_session
from verl_profiling.integrations.verl_actors import add_capture_methods
from verl_profiling.integrations.wrapping import around, around_async, wrap
from verl_profiling.trajectories import current_trajectory, span, trajectory, trajectory_fate
from verl_profiling.workers import AgentLoopCaptureMixin

__all__ = ["hook_agent_loops", "hook_simple_timer", "hook_tool_loop"]

_TOKENIZING = (
    "ct_build_initial_tokens",
    "ct_merge_context_msg",  # verl 0.9.1
    "ct_merge_non_assistant_msg",  # verl 0.9.0
    "ct_merge_assistant_token",
    "apply_chat_template",  # verl 0.9.0
)
_TIMERS = {"compute_score": "reward"}
_UNKNOWN_TOOL = "tool:(unknown)"
_LONGEST_NAME = 120
_STARTS_NOTHING = "verl.tools.base_tool"
"""Module of the ``create`` that only makes an id."""

_prepared: set[type[Any]] = set()


def hook_agent_loops(module: Any) -> None:
    """Record what ``AgentLoopWorker`` and its subclasses run; V1's is one."""
    worker, loop = module.AgentLoopWorker, module.AgentLoopBase
    add_capture_methods(worker, AgentLoopCaptureMixin)
    worker.trajectory_fates = _trajectory_fates
    wrap(worker, "_run_agent_loop", _as_trajectory)
    wrap(worker, "_compute_score", _described)
    wrap(worker, "_postprocess", around(partial(span, "collate")))
    for name in _TOKENIZING:
        if hasattr(loop, name):
            wrap(loop, name, around_async(partial(span, "tokenize")))


def hook_tool_loop(module: Any) -> None:
    """Record each tool call of ``ToolAgentLoop`` by its name, and the start of what a stateful tool needs."""
    wrap(module.ToolAgentLoop, "_call_tool", _as_tool)


def hook_simple_timer(module: Any) -> None:
    """Record verl's timers in a trajectory as spans of the same name."""
    wrap(module, "simple_timer", _timed)


def _as_trajectory(run_agent_loop: Callable[..., Any]) -> Callable[..., Any]:
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        info = kwargs.get("trajectory", args[1] if len(args) > 1 else {})
        with process_session().busy("trajectories") or nullcontext(), trajectory(**_identity(info, kwargs)):
            return await run_agent_loop(self, *args, **kwargs)

    return run


def _identity(info: Mapping[str, Any], prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return group, sample and facts; V1 names the sample, and V0 counts it among its neighbours."""
    return {
        "group": str(prompt.get("uid", info.get("sample_index", ""))),
        "sample": _integer(prompt.get("session_id", info.get("rollout_n"))),
        "validate": bool(info.get("validate")),
        "step": _integer(info.get("step")),
    }


def _described(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """Add what came out to the trajectory; every output passes here, whatever loop made it."""

    async def score(self: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        running = current_trajectory()
        if running is None:
            return await compute_score(self, outputs, *args, **kwargs)
        running.add(**_facts(outputs))
        result = await compute_score(self, outputs, *args, **kwargs)
        reward = getattr(outputs[-1], "reward_score", None) if outputs else None
        if type(reward) is float or isinstance(reward, Real):
            running.add(reward=float(reward))
        return result

    return score


def _facts(outputs: Sequence[Any]) -> dict[str, Any]:
    """Return facts of the outputs of one trajectory; most loops return one."""
    turns = prompt_tokens = response_tokens = 0
    first, last = [], []
    for output in outputs:
        turns += _integer(getattr(output, "num_turns", 0)) or 0
        prompt_tokens += len(getattr(output, "prompt_ids", ()))
        response_tokens += len(getattr(output, "response_ids", ()))
        extra = getattr(output, "extra_fields", None) or {}
        if (version := _integer(extra.get("min_global_steps"))) is not None:
            first.append(version)
        if (version := _integer(extra.get("max_global_steps"))) is not None:
            last.append(version)
    facts = {"turns": turns, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    if first and last:
        facts.update(min_version=min(first), max_version=max(last))
    return facts


def _integer(value: Any) -> int | None:
    if type(value) is int:  # nearly always; asking for the abstract class takes ten times as long
        return value
    return int(value) if isinstance(value, Integral) else None


def _as_tool(call_tool: Callable[..., Any]) -> Callable[..., Any]:
    async def call(
        self: Any, tool_call: Any, tools_kwargs: Any, agent_data: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = str(getattr(tool_call, "name", ""))[:_LONGEST_NAME]
        running = current_trajectory()
        if running is not None:
            running.add(tool_calls=running.facts.get("tool_calls", 0) + 1)
        # A model may ask for anything; only tools that there are have a name of their own.
        tools = getattr(agent_data, "_active_tools", None) or getattr(self, "tools", {})
        if asked in tools:
            _prepare(type(tools[asked]))
            opened = span(f"tool:{asked}")
        else:
            opened = span(_UNKNOWN_TOOL, asked=asked)
        with opened:
            return await call_tool(self, tool_call, tools_kwargs, agent_data, *args, **kwargs)

    return call


def _prepare(tool_class: type[Any]) -> None:
    """Hook the start of an environment or a sandbox, which a class of tools does in ``create``."""
    if tool_class in _prepared:
        return
    _prepared.add(tool_class)
    create = getattr(tool_class, "create", None)
    if create is not None and create.__module__ != _STARTS_NOTHING:
        wrap(tool_class, "create", around_async(partial(span, "environment:start")))


def _timed(simple_timer: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        with simple_timer(name, *args, **kwargs):
            if current_trajectory() is None:
                yield
            else:
                with span(_TIMERS.get(name, name)):
                    yield

    return timer


def _trajectory_fates(self: Any, fates: Sequence[tuple[str, int | None, str]]) -> None:
    """Record what the trainer did with trajectories that had ended: group, sample, fate."""
    for group, sample, fate in fates:
        trajectory_fate(group, fate, sample)
