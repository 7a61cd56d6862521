"""Noting the requests of a vLLM engine: a wrapper around ``generate``, an if-statement while idle."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from verl_profiling.engines.request_log import OpenRequest, RequestLog

__all__ = ["watch_async_llm", "watch_llm"]


def watch_async_llm(engine: Any, log: RequestLog) -> None:
    """Note every request of an ``AsyncLLM``."""
    generate = engine.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        stream: AsyncIterator[Any] = generate(*args, **kwargs)
        record = log.open()
        return stream if record is None else _noting(stream, record, _in_deltas(args, kwargs))

    engine.generate = watched


def watch_llm(engine: Any, log: RequestLog) -> None:
    """Note every request of an ``LLM``. It hands over a whole batch, so they end together."""
    generate = engine.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        record = log.open()
        outputs = generate(*args, **kwargs)
        if record is not None:
            for output in outputs:
                record.close(_prompt_tokens(output), sum(_lengths(output).values()))
        return outputs

    engine.generate = watched


async def _noting(stream: AsyncIterator[Any], record: OpenRequest, in_deltas: bool) -> AsyncIterator[Any]:
    last: Any = None
    lengths: dict[int, int] = {}
    try:
        async for output in stream:
            if not output.finished or last is not None:
                record.first_token()
            for index, length in _lengths(output).items():
                lengths[index] = length + (lengths.get(index, 0) if in_deltas else 0)
            last = output
            yield output
    finally:
        done = last is not None and last.finished
        record.close(_prompt_tokens(last), sum(lengths.values()), failed=not done)


def _in_deltas(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether each output of this call holds only what is new since the last."""
    parameters = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
    kind = getattr(parameters, "output_kind", None)
    return getattr(kind, "name", "") == "DELTA"


def _prompt_tokens(output: Any) -> int:
    return 0 if output is None else len(output.prompt_token_ids or ())


def _lengths(output: Any) -> dict[int, int]:
    return {completion.index: len(_tokens(completion)) for completion in output.outputs}


def _tokens(completion: Any) -> Sequence[int]:
    tokens: Sequence[int] = completion.token_ids
    return tokens
