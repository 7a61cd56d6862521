"""Sends the load of a captured step to an engine again, without the trainer.

The replay is captured like the rollout of a loop, so every command reads it. Prompts have the
recorded lengths and shared blocks, and random tokens; responses have the recorded lengths.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from verl_profiling import AsyncProfilingCallback, span, trajectory
from verl_profiling.engines import ENGINES, adapter_named
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.manifest import BLOCK_TOKENS
from verl_profiling.steps.load import Load, mooncake_rows
from verl_profiling.workers import AgentLoopCaptureMixin, RequestLog, RolloutCaptureMixin

# Tokens for a server behind a URL, which does not say its own: above the special ones and the bytes
# of SentencePiece (107 in Gemma, 258 in Llama 2) and the bytes of byte-level BPE (255).
_OF_ANY_MODEL = range(300, 500)
_MOST_CONNECTIONS = 1000
_WARM_UP_TOKENS = 2
_CONNECT_S = 10.0
_RESPONSE_S = 3600.0  # of one response, which comes as a whole: 100,000 tokens at 28 a second


class Server(Protocol):
    """A server with a capture mixin, and these methods.

    Attributes:
        tokens: Ids of the ordinary tokens of the model.
    """

    tokens: Sequence[int]

    async def generate(self, id: str, prompt: list[int], tokens: int) -> None:
        """Serve one request with exactly so many tokens."""

    async def reset(self) -> None:
        """Empty the prefix cache, as an update of the weights does."""

    def close(self) -> None:
        """End the engine."""


def ordinary_tokens(vocabulary: int, config: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the ids of tokens without a meaning of their own, such as an end or an image.

    Args:
        vocabulary: Number of token ids of the model.
        config: The model's configuration, as Hugging Face writes it.
        tokenizer: The model's tokenizer of transformers; ``None`` without one.
    """
    special = {*_special_in(config), *getattr(tokenizer, "all_special_ids", ())}
    size = min(vocabulary, getattr(tokenizer, "vocab_size", vocabulary))  # without added tokens
    return [token for token in range(size) if token not in special]


def _special_in(config: Mapping[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_in(value)
        elif str(name).endswith("_token_id"):  # id2label has numbers
            yield from value if isinstance(value, list) else [value]


class EngineServer(RolloutCaptureMixin):
    """An engine of this process.

    Args:
        package: Package of the engine.
        profiling: Settings of the capture.
        replica: Index of the replica.
        options: Options of the engine.

    Raises:
        ConfigError: The engine has no such option, or cannot be replayed on.
        ToolUnavailableError: The engine is not installed.
    """

    def __init__(
        self, package: str, profiling: Mapping[str, Any], replica: int, options: Mapping[str, Any]
    ) -> None:
        recorded = self.engine_args(profiling, engine=package)
        self._replayed = engine = adapter_named(package).for_replay(options, recorded)
        self.engine = engine.engine
        self.tokens: Sequence[int] = ordinary_tokens(
            engine.vocabulary, engine.config, engine.tokenizer
        )
        self.init_capture(profiling, replica=replica)

    async def generate(self, id: str, prompt: list[int], tokens: int) -> None:
        """Serve one request."""
        await self._replayed.generate(id, prompt, tokens)

    async def reset(self) -> None:
        """Empty the prefix cache."""
        await self._replayed.reset()

    def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()


class CompletionsServer(RolloutCaptureMixin):
    """A running server of OpenAI's completions, whose requests are logged where they are sent.

    Args:
        profiling: Settings of the capture.
        url: URL of the server, without the path.

    Raises:
        ConfigError: The server does not answer.
    """

    tokens: Sequence[int] = _OF_ANY_MODEL

    def __init__(self, profiling: Mapping[str, Any], url: str) -> None:
        self._url = url.rstrip("/")
        self._log = RequestLog()
        self._threads = ThreadPoolExecutor(_MOST_CONNECTIONS)
        self._model = self._answer("models", _CONNECT_S)["data"][0]["id"]
        self.init_capture(profiling, requests=self._log)

    async def generate(self, id: str, prompt: list[int], tokens: int) -> None:
        """Serve one request."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
        }
        with self._log.open(len(prompt), id=id) as request:
            loop = asyncio.get_running_loop()
            post = partial(self._answer, "completions", _RESPONSE_S, body)
            answer = await loop.run_in_executor(self._threads, post)
            request.response_tokens = answer["usage"]["completion_tokens"]

    def _answer(self, path: str, timeout_s: float, body: object = None) -> Any:
        """Return what the server answers.

        Raises:
            ConfigError: It does not answer in time, or with an error.
        """
        url = f"{self._url}/v1/{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise ConfigError("--engine", f"{url} gives no answer: {error}") from error

    async def reset(self) -> None:
        """Keep the server's cache, which is its owner's."""

    def close(self) -> None:
        """End the threads; the server runs on."""
        self._threads.shutdown()


def servers_of(
    engine: str, profiling: Mapping[str, Any], options: Mapping[str, Any], replicas: int
) -> list[Server]:
    """Return the servers for a replay.

    Args:
        engine: Package of the engine, or the URL of a server of OpenAI's completions.
        profiling: Settings of the capture.
        options: Options of the engine.
        replicas: Number of engines.

    Raises:
        ConfigError: The engine is unknown, has no such option, or is a URL with options.
        ToolUnavailableError: The engine is not installed.
    """
    if urlsplit(engine).scheme in ("http", "https"):
        if options or replicas != 1:
            raise ConfigError("--engine", "a running server keeps its own options and replicas")
        return [CompletionsServer(profiling, engine)]
    if engine not in ENGINES:
        raise ConfigError("--engine", f"unknown {engine!r}; {choices_hint(engine, ENGINES)}")
    return [EngineServer(engine, profiling, replica, options) for replica in range(replicas)]


async def replay(
    load: Load,
    servers: Sequence[Server],
    profiling: Mapping[str, Any],
    *,
    step: int = 1,
    times: int = 1,
    at_arrivals: bool = False,
) -> list[Path]:
    """Send a load; return the folders of the captures.

    Args:
        load: The load.
        servers: The servers. A session stays on one of them.
        profiling: Settings of the capture.
        step: Number of the first captured step.
        times: How often the load is sent, each time to an empty prefix cache.
        at_arrivals: Whether a session begins at its recorded time. Otherwise all begin at once,
            and only turns wait, for the one before and its tools.
    """
    agents, folders = AgentLoopCaptureMixin(), []
    agents.init_capture(profiling)
    sessions = _sessions(load)
    async with AsyncProfilingCallback(profiling) as callback:
        callback.add_workers("agent_loop", agents)
        callback.add_rollout(list(servers))
        for number in range(step, step + times):
            for server in servers:
                await server.generate("warm-up", [server.tokens[0]], _WARM_UP_TOKENS)
                await server.reset()
            await callback.on_step_begin(number)
            await callback.on_rollout_begin()
            begin_s = time.monotonic() if at_arrivals else None
            await asyncio.gather(
                *[
                    _send(rows, server, begin_s)
                    for rows, server in zip(sessions, cycle(servers), strict=False)
                ]
            )
            await callback.on_rollout_end()
            await callback.on_step_end()
            if callback.last_folder is not None:
                folders.append(callback.last_folder)
    return folders


def _sessions(load: Load) -> list[list[Mapping[str, Any]]]:
    """Return the rows of each session, sorted by time."""
    sessions: dict[object, list[Mapping[str, Any]]] = {}
    for row in mooncake_rows(load):
        sessions.setdefault(row["session_id"], []).append(row)
    return list(sessions.values())


async def _send(rows: Sequence[Mapping[str, Any]], server: Server, begin_s: float | None) -> None:
    """Send the turns of a session one after another."""
    if begin_s is not None:
        await asyncio.sleep(begin_s + rows[0]["timestamp"] / 1e3 - time.monotonic())
    name = rows[0]["session_id"]
    async with trajectory(group=rows[0]["group"]):
        for turn, row in enumerate(rows):
            if "delay" in row:
                async with span("tool:recorded"):
                    await asyncio.sleep(row["delay"] / 1e3)
            id = f"{name} turn {turn}"
            prompt = _prompt(row["hash_ids"], row["input_length"], server.tokens)
            async with span("generate", request=id):
                await server.generate(id, prompt, row["output_length"])


def _prompt(blocks: Sequence[int], length: int, tokens: Sequence[int]) -> list[int]:
    """Return a prompt of a length, with the same tokens wherever a block is the same."""
    prompt: list[int] = []
    for block in blocks:
        prompt += [tokens[place] for place in _block(block, len(tokens))]
    return prompt[:length]


@cache
def _block(number: int, tokens: int) -> list[int]:
    return random.Random(number).choices(range(tokens), k=BLOCK_TOKENS)
