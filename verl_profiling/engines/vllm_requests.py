"""Logs the requests of a vLLM engine with a wrapper around ``generate``, an if-statement while idle."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

from verl_profiling.engines.request_log import OpenRequest, RequestLog

__all__ = ["watch_vllm"]


def watch_vllm(engine: Any, log: RequestLog) -> None:
    """Log every request of an ``LLM`` or an ``AsyncLLM``."""
    if hasattr(engine, "llm_engine"):
        _watch_llm(engine, log)
    else:
        _watch_async_llm(engine, log)


def _watch_async_llm(engine: Any, log: RequestLog) -> None:
    """Log every request of an ``AsyncLLM``."""
    generate = engine.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = generate(*args, **kwargs)
        if not log.noting:
            return stream
        return _noting(stream, log.open(), kwargs.get("sampling_params", args[1] if len(args) > 1 else None))

    engine.generate = watched


def _watch_llm(engine: Any, log: RequestLog) -> None:
    """Log every request of an ``LLM``, which returns a whole batch, so that they end together."""
    generate = engine.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not log.noting:
            return generate(*args, **kwargs)
        record = log.open()
        outputs = generate(*args, **kwargs)
        for output in outputs:
            record.close(_prompt_tokens(output), sum(_lengths(output).values()))
        return outputs

    engine.generate = watched


async def _noting(
    stream: AsyncGenerator[Any, None], record: OpenRequest, parameters: Any
) -> AsyncGenerator[Any, None]:
    in_deltas = getattr(getattr(parameters, "output_kind", None), "name", "") == "DELTA"
    in_parts = in_deltas or getattr(parameters, "n", 1) > 1
    lengths: dict[int, int] = {}
    last: Any = None
    try:
        async for output in stream:
            if last is None and not output.finished:
                record.first_token()
            if in_parts:
                for index, length in _lengths(output).items():
                    lengths[index] = length + (lengths.get(index, 0) if in_deltas else 0)
            last = output
            yield output
    finally:
        done = last is not None and last.finished
        if last is not None and not in_parts:
            lengths = _lengths(last)
        record.close(_prompt_tokens(last), sum(lengths.values()), failed=not done)
        await stream.aclose()  # an abandoned request is aborted at once, as without this wrapper


def _prompt_tokens(output: Any) -> int:
    return 0 if output is None else len(output.prompt_token_ids or ())


def _lengths(output: Any) -> dict[int, int]:
    return {completion.index: len(completion.token_ids) for completion in output.outputs}
