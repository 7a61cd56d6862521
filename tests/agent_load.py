"""A captured step whose trajectories send requests of known lengths to a server of this process."""

from __future__ import annotations

import time
from pathlib import Path

from verl_profiling import ProfilingCallback, span, trajectory
from verl_profiling.workers import AgentLoopCaptureMixin, RequestLog, RolloutCaptureMixin

PROMPT = list(range(100))
"""The prompt of the group. Its first block is whole, and its second has 36 tokens."""
TOOL_S = 0.05


class Server(RolloutCaptureMixin):
    """A rollout server whose engine answers with as many tokens as it is asked for."""

    def __init__(self) -> None:
        self.requests = RequestLog()

    def answer(self, id: str, prompt: list[int], tokens: int, fails: bool = False) -> None:
        """Answer a request."""
        with self.requests.open(len(prompt), id=id) as request:
            request.prompt_ids = prompt
            time.sleep(0.01)
            request.response_tokens = tokens
            if fails:
                raise ValueError("the engine is out of memory")


def record_load(save_path: Path, **rollout: bool) -> Path:
    """Capture a step, and return its folder.

    Two trajectories of a group send the same prompt. The first one then calls a tool, and sends a
    longer prompt. A request without a trajectory and one that fails follow.
    """
    config = {"enable": True, "tool": "spans", "save_path": str(save_path), "rollout": rollout}
    server, agents = Server(), AgentLoopCaptureMixin()
    server.init_capture(config, replica=0, requests=server.requests)
    agents.init_capture(config)
    with ProfilingCallback(config) as callback:
        callback.add_rollout([server])
        callback.add_workers("agent_loop", agents)
        callback.on_step_begin(1)
        callback.on_rollout_begin()
        with trajectory(group="p7", sample=0):
            with span("generate", request="a1"):
                server.answer("a1", PROMPT, 20)
            with span("tool:search"):
                time.sleep(TOOL_S)
            with span("generate", request="a2"):
                server.answer("a2", [*PROMPT, *range(500, 540)], 7)
        with trajectory(group="p7", sample=1), span("generate", request="b1"):
            server.answer("b1", PROMPT, 30)
        server.answer("c", [9, 8, 7], 5)
        try:
            server.answer("d", PROMPT, 3, fails=True)
        except ValueError:
            pass
        callback.on_rollout_end()
        callback.on_step_end()
    return save_path / "step_000001"
