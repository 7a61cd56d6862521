"""Logs the requests of an SGLang engine with a wrapper around its tokenizer manager."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

from verl_profiling.engines.request_log import OpenRequest, RequestLog

__all__ = ["watch_manager"]


def watch_manager(manager: Any, log: RequestLog) -> None:
    """Log every request, by whichever method or route of the engine it came."""
    generate = manager.generate_request

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = generate(*args, **kwargs)
        return _noting(stream, log.open()) if log.noting else stream

    manager.generate_request = watched


async def _noting(stream: AsyncGenerator[Any, None], record: OpenRequest) -> AsyncGenerator[Any, None]:
    """Yield what a request yields: its state so far, or the list of a batch's whole responses."""
    latest: dict[int, dict[str, Any]] = {}
    try:
        async for output in stream:
            responses = output if isinstance(output, list) else [output]
            if not latest and responses[0]["meta_info"].get("finish_reason") is None:
                record.first_token()
            for place, response in enumerate(responses):
                latest[response.get("index") or place] = response["meta_info"]
            yield output
    finally:
        for information in latest.values() or [{}]:
            record.close(
                information.get("prompt_tokens", 0),
                information.get("completion_tokens", 0),
                failed=information.get("finish_reason") is None,
            )
        await stream.aclose()  # an abandoned request is aborted at once, as without this wrapper
