"""The load of a step: what its engines were asked for, in the order in which it was sent.

A replayer sends the load again: each request when it was sent, or the next turn of a trajectory
when the turn before has ended and the trajectory's tools have taken their time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from verl_profiling.files.trajectory_log import TrajectoryLog
from verl_profiling.manifest import BLOCK_TOKENS, Manifest, Request, StageSpan
from verl_profiling.steps.requests import (
    is_validation,
    requests_by_id,
    requests_of_spans,
    validations,
)
from verl_profiling.steps.step import StepInputs
from verl_profiling.steps.trajectory_spans import read_logs


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load.

    Attributes:
        request: The request.
        session: Name of the trajectory that sent it; of the request, if none is known.
        group: Id of the group of the trajectory; empty if unknown.
        delay_ns: Time from the end of the trajectory's previous request to this one (ns); ``None``
            for the first request of a session.
    """

    request: Request
    session: str
    group: str = ""
    delay_ns: int | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a step.

    Attributes:
        requests: The requests that can be replayed, in the order of sending.
        left_out: Number of the other requests, by the reason.
        problems: Sentences on unreadable logs of trajectories.
    """

    requests: list[LoadRequest]
    left_out: dict[str, int]
    problems: list[str]

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len({row.session for row in self.requests})

    @property
    def said_left_out(self) -> str:
        """The numbers of the other requests, in words; empty if there is none."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())

    @property
    def has_hashes(self) -> bool:
        """Whether the hashes of some prompt are recorded."""
        return any(row.request.prompt_blocks for row in self.requests)


def load_of(manifest: Manifest, inputs: StepInputs) -> Load:
    """Return the load of a step.

    Args:
        manifest: The step's manifest.
        inputs: The files of the step; of them, the logs of trajectories are read.
    """
    left_out = Counter[str]()
    kept: list[Request] = []
    validation_stages = validations(manifest)
    for worker in manifest.workers:
        for request in worker.requests:
            reason = _why_not(request, validation_stages)
            if reason:
                left_out[reason] += 1
            else:
                kept.append(request)
    kept.sort(key=attrgetter("begin_ns"))
    trajectories, problems = _trajectories(manifest, inputs)
    return Load(
        requests=list(_in_sessions(kept, trajectories)),
        left_out=dict(left_out),
        problems=problems,
    )


def _why_not(request: Request, validation_stages: list[StageSpan]) -> str:
    """Return why a request is no part of the load; empty if it is a part."""
    if request.failed:
        return "failed or aborted"
    if not request.prompt_tokens or not request.response_tokens:
        return "without lengths"
    if is_validation(request, validation_stages):
        return "of validation"
    return ""


_Trajectory = tuple[str, str]
"""Name and group of a trajectory."""


def _trajectories(
    manifest: Manifest, inputs: StepInputs
) -> tuple[dict[int, _Trajectory], list[str]]:
    """Return the trajectory of each request, by the identity of its object, and problems."""
    requests = requests_by_id(manifest.workers)
    trajectories: dict[int, _Trajectory] = {}
    problems: list[str] = []
    for source, log, sentences in read_logs(inputs):
        problems += sentences
        if log is not None:
            trajectories.update(_senders(log, source.offset_ns, requests))
    return trajectories, problems


def _senders(
    log: TrajectoryLog, offset_ns: int, requests: Mapping[str, list[Request]]
) -> Iterator[tuple[int, _Trajectory]]:
    """Yield the identity of each request of a log, with the trajectory that sent it."""
    groups = {trajectory.id: trajectory.group for trajectory in log.trajectories}
    spans = {span.id: span for span in log.spans if span.trajectory in groups}
    for number, request in requests_of_spans(spans.values(), offset_ns, requests).items():
        trajectory = spans[number].trajectory
        yield id(request), (f"{log.lane}:{trajectory}", groups[trajectory])


def _in_sessions(
    requests: Iterable[Request], trajectories: Mapping[int, _Trajectory]
) -> Iterator[LoadRequest]:
    """Yield requests, sorted by begin, each with its session and delay.

    A request that was sent while another one of its trajectory ran waited for nothing of it, so it
    has a session of its own.
    """
    ends: dict[str, int] = {}
    for number, request in enumerate(requests):
        alone = f"request {number}"
        session, group = trajectories.get(id(request), (alone, ""))
        delay_ns = None
        if session in ends:
            delay_ns = request.begin_ns - ends[session]
        if delay_ns is not None and delay_ns < 0:
            session, delay_ns = alone, None
        ends[session] = request.end_ns
        yield LoadRequest(request=request, session=session, group=group, delay_ns=delay_ns)


def mooncake_rows(load: Load) -> Iterator[dict[str, object]]:
    """Yield the rows of a file in Mooncake's format (https://github.com/kvcache-ai/Mooncake).

    ``timestamp`` (ms) counts from the load's first request, and ``delay`` (ms) from the end of the
    session's previous request. Replayers that know sessions take the delay (Dynamo 1.6.1), others
    the timestamp (vLLM 0.32). ``input_length`` is the length of the whole prompt, also of a later
    turn. ``hash_ids`` has a number for each block of a prompt; equal numbers are equal blocks. A
    prompt without recorded hashes has numbers of its own.
    """
    number_of: dict[tuple[object, int], int] = {}
    for place, row in enumerate(load.requests):
        request = row.request
        blocks = -(-request.prompt_tokens // BLOCK_TOKENS)
        keys: list[tuple[object, int]] = [(place, block) for block in range(blocks)]
        if len(request.prompt_blocks) == blocks:
            keys = [("hash", block) for block in request.prompt_blocks]
        line: dict[str, object] = {
            "timestamp": (request.begin_ns - load.requests[0].request.begin_ns) / 1e6,
            "session_id": row.session,
            "group": row.group,
            "input_length": request.prompt_tokens,
            "output_length": request.response_tokens,
            "hash_ids": [number_of.setdefault(key, len(number_of)) for key in keys],
        }
        if row.delay_ns is not None:
            line["delay"] = row.delay_ns / 1e6
        yield line
