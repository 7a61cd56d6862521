"""The parts of ``what_if_verl.py`` that verl takes from its user: reward, tool,
and replay buffer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

_STOP_EVERY = 8


async def compute_score(extra_info: dict[str, Any], **others: Any) -> float:
    """Return one reward for all, after the time that the sample says."""
    await asyncio.sleep(extra_info["reward_s"])
    return 1.0


class Search(BaseTool):  # type: ignore[misc]
    """A tool whose calls take the time that the sample says."""

    async def create(
        self, instance_id: str | None = None, create_kwargs: dict[str, Any] | None = None
    ) -> tuple[str, ToolResponse]:
        """Search."""
        await asyncio.sleep((create_kwargs or {})["seconds"])
        return "search", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return what was found."""
        return ToolResponse(text="nothing"), 0.0, {}


@ToolParser.register("always")
class Always(ToolParser):  # type: ignore[misc]
    """Calls the tool after each response; the model has random weights and never asks for it."""

    @property
    def stop_token_ids(self) -> list[int]:
        """End responses early, or the first would use up the length of the whole conversation."""
        return list(range(0, len(self.tokenizer), _STOP_EVERY))

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[Any]]:
        """Return the text of a response, and a call."""
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="search", arguments="{}")]


class Planned(ReplayBuffer):  # type: ignore[misc]
    """A replay buffer that is polled, and a batch that is trained on,
    as often as planned for the step.
    """

    def sample(self, global_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Return a batch."""
        self.poll_interval = self.sampler_kwargs.poll_s[global_steps - 1]
        trainer = self.refill_fn.__self__
        trainer.config.actor_rollout_ref.actor.ppo_epochs = self.sampler_kwargs.epochs[
            global_steps - 1
        ]
        return super().sample(global_steps, *args, **kwargs)
