"""The requests of a step: one row each, and the span of a trajectory that sent it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from verl_profiling.manifest import Manifest, Request, StageSpan


def requests_by_id(manifest: Manifest) -> dict[str, list[Request]]:
    """Return the requests by their id, sorted by begin; requests without an id are left out."""
    by_id: dict[str, list[Request]] = {}
    for worker in manifest.workers:
        for request in worker.requests:
            if request.id:
                by_id.setdefault(request.id, []).append(request)
    for served in by_id.values():
        served.sort(key=_begin)
    return by_id


def joined(
    spans: Iterable[tuple[int, str, int, int]], requests: Mapping[str, list[Request]]
) -> dict[int, Request]:
    """Return the request of each span, by the span's number; spans without a request are left out.

    Several requests may have the span's request id, e.g. after a retry. Of the last request that
    begins before the span and the first one after, that with the larger overlap is the span's.

    Args:
        spans: (number, request id, begin, end) of each span, in unix ns.
        requests: The requests by id, sorted by begin.
    """
    request_of = {}
    for number, id, begin, end in spans:
        served = requests.get(id, [])
        place = bisect_left(served, begin, key=_begin)
        near = served[max(place - 1, 0) : place + 1]
        overlaps = [min(request.end_ns, end) - max(request.begin_ns, begin) for request in near]
        largest = max(overlaps, default=-1)
        if largest >= 0:
            # of two equal overlaps, that of the later request
            request_of[number] = near[-1 if overlaps[-1] == largest else 0]
    return request_of


def _begin(request: Request) -> int:
    return request.begin_ns


VALIDATE = "validate"
"""Name of the validation stage."""


def validations(manifest: Manifest) -> list[StageSpan]:
    """Return the loop's stages that validate, in the step and around it: a capture may last until
    their end.
    """
    stages = (*manifest.stages, *manifest.around_the_step)
    return [span for span in stages if span.name == VALIDATE]


def is_validation(request: Request, validation_stages: list[StageSpan]) -> bool:
    """Return whether a request began in a stage of :func:`validations`."""
    return any(span.begin_ns <= request.begin_ns < span.end_ns for span in validation_stages)


def requests(manifest: Manifest) -> list[RequestRow]:
    """Return the requests of every replica, with times relative to the begin of the step."""
    validation_stages = validations(manifest)
    rows = []
    for worker in manifest.workers:
        for request in worker.requests:
            fields: dict[str, Any] = {}
            for name, value in msgspec.structs.asdict(request).items():
                if name == "prompt_blocks":
                    continue
                if name.endswith("_ns"):
                    fields[name.replace("_ns", "_us")] = _since(manifest.begin_ns, value)
                else:
                    fields[name] = value
            begin_ns = request.begin_ns
            row = RequestRow(
                **fields,
                worker=worker.name,
                latency_us=(request.end_ns - begin_ns) / 1000,
                to_first_token_us=_since(begin_ns, request.first_token_ns),
                per_token_us=per_token_us(request),
                validate=is_validation(request, validation_stages),
            )
            rows.append(row)
    return rows


def _since(begin_ns: int, time_ns: int) -> float | None:
    return (time_ns - begin_ns) / 1000 if time_ns else None


def per_token_us(request: Request) -> float | None:
    """Return the mean time per response token (us), without the first token, which is part of
    prefill; ``None`` if it is unknown.
    """
    if not request.first_token_ns or request.response_tokens < 2:
        return None
    decode_ns = (request.last_token_ns or request.end_ns) - request.first_token_ns
    return decode_ns / 1000 / (request.response_tokens - 1)


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request that ended during the capture of its replica; times are in us.

    Requests are a table of their own, not part of the report: a step may have 100,000.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        begin_us: Time of sending, relative to the begin of the step, like all times of a request.
        first_token_us: Time of the first token in the engine, or else of the first output at the
            sender; ``None`` if neither is known.
        end_us: Time of the complete response.
        latency_us: Duration from sending to the complete response.
        prompt_tokens: Length of the prompt.
        response_tokens: Length of the response.
        id: Request id in the engine; empty if unknown.
        arrival_us: Time of arrival at the engine's scheduler, if known.
        scheduled_us: Time at which the engine first scheduled the request, if known.
        last_token_us: Time of the last token in the engine, if known.
        to_first_token_us: Duration from sending to the first token, if known.
        per_token_us: Mean time per token after the first, if known.
        cached_tokens: Prompt tokens from the engine's prefix cache, if known.
        preemptions: Number of preemptions by the engine, if known.
        policy_version: Policy version at the begin of the request, if known.
        failed: Whether the request raised or was aborted.
        validate: Whether the request was sent during validation.
    """

    worker: str
    replica: int
    begin_us: float
    first_token_us: float | None
    end_us: float
    latency_us: float
    prompt_tokens: int
    response_tokens: int
    id: str = ""
    arrival_us: float | None = None
    scheduled_us: float | None = None
    last_token_us: float | None = None
    to_first_token_us: float | None = None
    per_token_us: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    policy_version: int | None
    failed: bool
    validate: bool = False
