"""The requests of a step: one row each, and the span of a trajectory that sent it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter

import msgspec

from verl_profiling.files.trajectory_log import SpanRecord
from verl_profiling.manifest import CaptureResult, Manifest, Request, StageSpan
from verl_profiling.slices.intervals import grouped

_begin = attrgetter("begin_ns")


def requests_by_id(workers: Iterable[CaptureResult]) -> dict[str, list[Request]]:
    """Return the requests by their id, sorted by begin; requests without an id are left out."""
    requests = sorted(chain.from_iterable(map(attrgetter("requests"), workers)), key=_begin)
    by_id = grouped(requests, attrgetter("id"))
    by_id.pop("", None)
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


def requests_of_spans(
    spans: Iterable[SpanRecord], offset_ns: int, requests: Mapping[str, list[Request]]
) -> dict[int, Request]:
    """Return the request of each span of a log, by the span's id, as :func:`joined`.

    Args:
        spans: The spans.
        offset_ns: Clock offset: time in the log minus time on the controller's clock.
        requests: The requests by id, sorted by begin.
    """
    waits = []
    for span in spans:
        times = span.begin_ns - offset_ns, span.end_ns - offset_ns
        waits.append((span.id, span.request, *times))
    return joined(waits, requests)


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


def requests(manifest: Manifest) -> Iterator[RequestRow]:
    """Yield the requests of every replica, with times relative to the begin of the step."""
    validation_stages = validations(manifest)
    for worker in manifest.workers:
        for request in worker.requests:
            fields = msgspec.structs.asdict(request)
            del fields["prompt_blocks"]
            for name in list(fields):
                if name.endswith("_ns"):
                    since_us = _since(manifest.begin_ns, fields.pop(name))
                    fields[name.replace("_ns", "_us")] = since_us
            begin_ns = request.begin_ns
            latency_us = None
            if not request.ends_with_batch:
                latency_us = (request.end_ns - begin_ns) / 1000
            yield RequestRow(
                **fields,
                worker=worker.name,
                latency_us=latency_us,
                to_first_token_us=_since(begin_ns, request.first_token_ns),
                per_token_us=per_token_us(request),
                validate=is_validation(request, validation_stages),
            )


def _since(begin_ns: int, time_ns: int) -> float | None:
    if time_ns:
        return (time_ns - begin_ns) / 1000
    return None


def per_token_us(request: Request) -> float | None:
    """Return the mean time per response token (us), without the first token, which is part of
    prefill; ``None`` if it is unknown.
    """
    if not request.first_token_ns or request.response_tokens < 2 or request.ends_with_batch:
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
        end_us: Time of the complete response, or of its batch if ``ends_with_batch``.
        latency_us: Duration from sending to the complete response, if known.
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
        ends_with_batch: Whether only the end of the response's batch is known, and not its own.
        validate: Whether the request was sent during validation.
    """

    worker: str
    replica: int
    begin_us: float
    first_token_us: float | None
    end_us: float
    latency_us: float | None
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
    ends_with_batch: bool = False
    validate: bool = False
