"""Chooses tool calls in a model's place, as a plugin of verl: random weights never ask for a tool.

A parser of tool calls, ``rollout.multi_turn.format: chosen``. It chooses by the tokens of a
response, so equal responses make equal calls. All else is verl's own ``ToolAgentLoop``.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

_STOP_EVERY = 8
_CALLS: tuple[tuple[tuple[str, dict[str, str]], ...], ...] = (
    (),
    (("calculate", {"expression": "1+2"}),),
    (("search", {"query": "{}"}),),
    (("search", {"query": "{}"}), ("calculate", {"expression": "3+4"})),
    (("parse", {"text": "a b c"}),),
    (("sandbox", {"command": "true"}),),
    (("compile_code", {"code": "pass"}),),
)


def _register(module: ModuleType) -> None:
    @module.ToolParser.register("chosen")
    class ChosenCalls(module.ToolParser):  # type: ignore[misc, name-defined]
        """Makes none, one or two calls after each response."""

        @property
        def stop_token_ids(self) -> list[int]:
            """End responses early, or the first would use up the length
            of the whole conversation.
            """
            return list(range(0, len(self.tokenizer), _STOP_EVERY))

        async def extract_tool_calls(
            self, responses_ids: list[int], tools: Any = None
        ) -> tuple[str, list[Any]]:
            """Return the text of a response, and the calls chosen by it."""
            number = sum(responses_ids)
            return self.tokenizer.decode(responses_ids), [
                module.FunctionCall(
                    name=name,
                    arguments=json.dumps({key: text.format(number) for key, text in given.items()}),
                )
                for name, given in _CALLS[number % len(_CALLS)]
            ]


register_post_import_hook(_register, "verl.experimental.agent_loop.tool_parser")
