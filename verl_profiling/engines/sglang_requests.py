"""Logs the requests of SGLang's tokenizer manager, through which all requests go."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from verl_profiling.engines.request_log import OpenRequest, RequestLog


def watch_manager(manager: Any, log: RequestLog) -> None:
    """Log every request to an SGLang engine, for all of its methods and routes.

    Every response has its id, lengths, cached tokens and retractions. With ``enable_metrics``, a
    response has times: arrival and scheduling from 0.5.6 on, end of prefill from 0.5.12 on. The
    times are unix seconds of the scheduler's host, so they are kept only if that is this host.
    Without data-parallel ranks, it is: requests go to the scheduler of the first node, however many
    nodes a replica has.
    """
    arguments = getattr(manager, "server_args", None)
    shares_clock = min(getattr(arguments, "nnodes", 1), getattr(arguments, "dp_size", 1)) == 1

    log.watch_streams(manager, "generate_request", partial(_noting, manager, log, shares_clock))
    if log.busy is not None:
        log.busy.sums.tokens.append(partial(getattr, manager, "last_receive_tstamp", 0.0))


async def _noting(
    manager: Any,
    log: RequestLog,
    shares_clock: bool,
    stream: AsyncGenerator[Any, None],
    obj: Any = None,
    *_: Any,
    **__: Any,
) -> AsyncGenerator[Any, None]:
    """Log a request; yield its outputs, which are partial responses or lists of a batch."""
    rid = getattr(obj, "rid", None)
    latest: dict[int, dict[str, Any]] = {}
    prompts = _prompts(obj)  # now, as SGLang expands them
    samples = _samples(obj)
    given = rid if isinstance(rid, str) else ""
    ids = [given] * prompts if samples > 1 else []  # SGLang gives each sample an id of its own
    if isinstance(rid, list):
        ids = rid
    with log.open(id=given) as record:
        try:
            async for output in stream:
                responses = output if isinstance(output, list) else [output]
                if not latest and responses[0]["meta_info"].get("finish_reason") is None:
                    record.first_token()
                for place, response in enumerate(responses):
                    latest[response.get("index") or place] = response["meta_info"]
                yield output
        finally:
            for place in range(max([prompts * samples, *(place + 1 for place in latest)])):
                information = latest.get(place) or _so_far(manager, given, obj)
                _tell(record, information, shares_clock)
                if len(latest) > 1:
                    record.last_token_ns = _finished_ns(record, information, samples)
                record.id = information.get("id", given)
                if place // samples < len(ids):
                    record.id = ids[place // samples] or record.id
                record.prompt_ids = _prompt_ids(obj, place // samples)
                record.close(
                    information.get("prompt_tokens", 0),
                    information.get("completion_tokens", 0),
                    failed=_is_cut(information.get("finish_reason")),
                )
            # An abandoned request is aborted at once, as without this wrapper.
            await stream.aclose()


def _prompts(obj: Any) -> int:
    """Return the number of prompts of a request, as text or as tokens."""
    given = getattr(obj, "text", None) or getattr(obj, "input_ids", None)
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        return len(given)
    return 1


def _prompt_ids(obj: Any, place: int) -> list[int]:
    """Return the token ids of one prompt of a request; empty if the request has text."""
    ids = getattr(obj, "input_ids", None) or []
    if ids and isinstance(ids[0], list):
        return ids[place] if place < len(ids) else []
    return ids


def _samples(obj: Any) -> int:
    """Return the number of samples of each prompt."""
    parameters = getattr(obj, "sampling_params", None)
    first = parameters[0] if isinstance(parameters, list) and parameters else parameters
    return int(first.get("n") or 1) if isinstance(first, dict) else 1


def _is_cut(reason: Any) -> bool:
    """Return whether a response has not ended, or was aborted."""
    return reason is None or (isinstance(reason, dict) and reason.get("type") == "abort")


def _so_far(manager: Any, rid: str, obj: Any) -> dict[str, Any]:
    """Return the lengths so far of a request that ends without an output, e.g. by cancellation."""
    state = getattr(manager, "rid_to_state", {}).get(rid)
    if state is None:
        return {}
    prompt = getattr(obj, "input_ids", None) or ()
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(getattr(state, "output_ids", ())),
    }


def _tell(record: OpenRequest, information: dict[str, Any], shares_clock: bool) -> None:
    """Copy SGLang's data on a response into the request's record;
    versions up to 0.5.9 have other keys.
    """
    record.cached_tokens = information.get("cached_tokens")
    record.preemptions = information.get("num_retractions", information.get("total_retractions"))
    if not shares_clock:
        return
    scheduled_s = information.get("forward_entry_time")
    if scheduled_s is None and {"inference_time", "decode_finished_ts"} <= information.keys():
        scheduled_s = information["decode_finished_ts"] - information["inference_time"]
    queued_s = information.get("queue_time")
    record.scheduled_ns = _ns(scheduled_s)
    record.first_token_ns = _ns(information.get("prefill_finished_time"))
    record.arrival_ns = 0
    # A retracted request queues again.
    if scheduled_s is not None and queued_s is not None and not record.preemptions:
        record.arrival_ns = _ns(scheduled_s - queued_s)


def _finished_ns(record: OpenRequest, information: dict[str, Any], samples: int) -> int:
    """Return when the manager had all tokens of a response of a batch; 0 if unknown.

    A sample of several begins later than its request, so its latency does not tell.
    """
    latency_s = information.get("e2e_latency")
    if samples == 1 and latency_s:
        return record.begin_ns + _ns(latency_s)
    return _ns(information.get("request_finished_ts"))


def _ns(unix_s: float | None) -> int:
    return round(unix_s * 1e9) if unix_s else 0
