"""Logs the requests of a vLLM engine with a wrapper around ``generate``, an if-statement while idle.

The id, the lengths and the cached tokens of a request are in each of vLLM's outputs. With them come its
``RequestStateStats`` unless the engine was started with ``disable_log_stats``: readings of the
monotonic clock in the process of the engine core, and from 0.30 the number of preemptions. They are
those of one sample, so of a request for several only the id is told.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

from verl_profiling import clock
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
    shares_clock = _shares_clock(engine)

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = generate(*args, **kwargs)
        if log.busy is not None:
            log.busy.while_alive(stream)
        if not log.noting:
            return stream
        record = log.open(id=kwargs.get("request_id", args[2] if len(args) > 2 else ""))
        parameters = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        return _noting(stream, record, parameters, shares_clock)

    engine.generate = watched


def _watch_llm(engine: Any, log: RequestLog) -> None:
    """Log every request of an ``LLM``, which returns a whole batch, so that they end together."""
    generate = engine.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with log.busy or nullcontext():
            return noted(*args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not log.noting:
            return generate(*args, **kwargs)
        batch = log.open()
        outputs = generate(*args, **kwargs)
        for output in outputs:
            batch.id = output.request_id
            _tell(batch, output if len(output.outputs) == 1 else None, shares_clock=True)
            batch.close(_prompt_tokens(output), sum(_lengths(output).values()))
        return outputs

    engine.generate = watched


async def _noting(
    stream: AsyncGenerator[Any, None], record: OpenRequest, parameters: Any, shares_clock: bool
) -> AsyncGenerator[Any, None]:
    in_deltas = getattr(getattr(parameters, "output_kind", None), "name", "") == "DELTA"
    several = getattr(parameters, "n", 1) > 1
    in_parts = in_deltas or several
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
        response_tokens = sum(lengths.values())
        _tell(record, last if response_tokens and not several else None, shares_clock)
        record.close(_prompt_tokens(last), response_tokens, failed=not done)
        await stream.aclose()  # an abandoned request is aborted at once, as without this wrapper


def _tell(record: OpenRequest, output: Any, shares_clock: bool) -> None:
    """Note what vLLM knows of a request, and nothing without an output."""
    record.arrival_ns = record.scheduled_ns = record.first_token_ns = record.last_token_ns = 0
    record.cached_tokens = getattr(output, "num_cached_tokens", None)
    statistics = getattr(output, "metrics", None)
    record.preemptions = getattr(statistics, "num_preemptions", None)
    if statistics is None or not shares_clock:
        return
    ahead_ns = clock.now_ns() - time.monotonic_ns()

    def unix_ns(name: str) -> int:
        monotonic_s = getattr(statistics, name, 0.0)
        return ahead_ns + round(monotonic_s * 1e9) if monotonic_s else 0

    record.arrival_ns = unix_ns("queued_ts")
    record.scheduled_ns = unix_ns("scheduled_ts")
    record.first_token_ns = unix_ns("first_token_ts")
    record.last_token_ns = unix_ns("last_token_ts")


def _shares_clock(engine: Any) -> bool:
    """Return whether all engine cores run on this host: only there is their monotonic clock also ours."""
    parallel = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
    here = getattr(parallel, "data_parallel_size_local", 1)
    return (
        getattr(parallel, "local_engines_only", False) or getattr(parallel, "data_parallel_size", 1) <= here
    )


def _prompt_tokens(output: Any) -> int:
    return 0 if output is None else len(output.prompt_token_ids or ())


def _lengths(output: Any) -> dict[int, int]:
    return {completion.index: len(completion.token_ids) for completion in output.outputs}
