"""Logs the requests of an SGLang engine with a wrapper around its tokenizer manager.

Every response carries its id, lengths, cached tokens and retractions. When the scheduler got it and took it
up is there only with ``enable_metrics`` (0.5.6), and when its prompt was done (0.5.12): in unix seconds of
the scheduler's host, so they are passed on only where all schedulers run on this one.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

from verl_profiling.engines.request_log import OpenRequest, RequestLog

__all__ = ["watch_manager"]


def watch_manager(manager: Any, log: RequestLog) -> None:
    """Log every request, by whichever method or route of the engine it came."""
    generate = manager.generate_request
    arguments = getattr(manager, "server_args", None)
    shares_clock = min(getattr(arguments, "nnodes", 1), getattr(arguments, "dp_size", 1)) == 1

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = generate(*args, **kwargs)
        if log.busy is not None:
            log.busy.while_alive(stream)
        if not log.noting:
            return stream
        rid = getattr(kwargs.get("obj", args[0] if args else None), "rid", None)
        return _noting(stream, log.open(id=rid if isinstance(rid, str) else ""), shares_clock)

    manager.generate_request = watched


async def _noting(
    stream: AsyncGenerator[Any, None], record: OpenRequest, shares_clock: bool
) -> AsyncGenerator[Any, None]:
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
            _tell(record, information, shares_clock)
            record.close(
                information.get("prompt_tokens", 0),
                information.get("completion_tokens", 0),
                failed=information.get("finish_reason") is None,
            )
        await stream.aclose()  # an abandoned request is aborted at once, as without this wrapper


def _tell(record: OpenRequest, information: dict[str, Any], shares_clock: bool) -> None:
    """Note what SGLang knows of a response; the keys up to 0.5.9 are others."""
    record.id = information.get("id", record.id)
    record.cached_tokens = information.get("cached_tokens")
    record.preemptions = information.get("num_retractions", information.get("total_retractions"))
    known = information if shares_clock else {}
    scheduled_s = known.get("forward_entry_time")
    if scheduled_s is None and "inference_time" in known and "decode_finished_ts" in known:
        scheduled_s = known["decode_finished_ts"] - known["inference_time"]
    queued_s = known.get("queue_time")
    if scheduled_s is None or queued_s is None or record.preemptions:  # a retracted request queues again
        queued_s = None
    record.scheduled_ns = _ns(scheduled_s)
    record.arrival_ns = 0 if queued_s is None else _ns(scheduled_s - queued_s)
    record.first_token_ns = _ns(known.get("prefill_finished_time"))


def _ns(unix_s: float | None) -> int:
    return round(unix_s * 1e9) if unix_s else 0
