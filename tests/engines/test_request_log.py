"""The log of requests: what is kept of each, whoever writes it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from verl_profiling.engines.sglang_requests import watch_manager
from verl_profiling.manifest import Request
from verl_profiling.workers import RequestLog


@pytest.fixture
def log() -> RequestLog:
    """A log that takes note, of replica 3 at policy version 7."""
    log = RequestLog()
    log.serve(3, enable=True)
    log.begin(7)
    return log


def test_a_request_has_its_times_its_lengths_and_its_version(log: RequestLog) -> None:
    """The first of several first tokens counts, and the end of the block is the end."""
    with log.open(prompt_tokens=5) as request:
        request.first_token()
        after_first_ns = time.time_ns()
        time.sleep(0.002)
        request.first_token()
        request.response_tokens = 9
    [noted] = log.end()
    assert (noted.replica, noted.policy_version) == (3, 7)
    assert (noted.prompt_tokens, noted.response_tokens, noted.failed) == (5, 9, False)
    assert noted.begin_ns < noted.first_token_ns <= after_first_ns < noted.end_ns


def test_a_batch_closes_one_record_for_each_of_its_requests(log: RequestLog) -> None:
    with log.open() as batch:
        for length in (1, 2, 3):
            batch.close(4, length)
    assert [noted.response_tokens for noted in log.end()] == [1, 2, 3]


@pytest.mark.parametrize(
    "told",
    [
        {"arrival_ns": 1},
        {"last_token_ns": 4 * 10**18},
        {"arrival_ns": 3_000, "scheduled_ns": 2_000},
        {"scheduled_ns": 3_000, "first_token_ns": 2_000},
        {"first_token_ns": 3_000, "last_token_ns": 2_000},
    ],
)
def test_times_that_cannot_be_are_unknown(log: RequestLog, told: dict[str, Any]) -> None:
    """Those of another host's clock, out of order or no times at all:
    what was seen here is kept.
    """
    with log.open() as request:
        request.first_token()
        begin_ns = time.time_ns()
        time.sleep(0.001)
        for name, value in told.items():
            setattr(request, name, begin_ns + value if value in (2_000, 3_000) else value)
    [noted] = log.end()
    assert (noted.arrival_ns, noted.scheduled_ns, noted.last_token_ns) == (0, 0, 0)
    assert noted.begin_ns < noted.first_token_ns <= begin_ns
    assert [name for name, _, _ in noted.parts()] == ["first token", "decode"]


@pytest.mark.parametrize(
    ("id", "kept"),
    [
        ("a-1", "a-1"),
        (7, "7"),
        (None, "None"),
        ("\ud800x", "?x"),
        ("x" * 10**6, "x" * 200),
    ],
)
def test_a_manifest_can_hold_any_id_and_count(log: RequestLog, id: Any, kept: str) -> None:
    """Clients choose ids, and an engine may say -1, or nothing, for what it does not know."""
    counts: list[Any] = [-1, None, 1.5, "4"]
    for count in counts:
        with log.open(id=id) as request:
            request.prompt_tokens = request.response_tokens = request.cached_tokens = count
            request.preemptions = count
    noted = log.end()
    assert msgspec.json.decode(msgspec.json.encode(noted), type=list[Request]) == noted
    for request_ in noted:
        assert (request_.id, request_.prompt_tokens, request_.response_tokens) == (kept, 0, 0)
        assert (request_.cached_tokens, request_.preemptions) == (None, None)


def test_requests_that_have_not_ended_are_known_by_their_begin(log: RequestLog) -> None:
    """The capture in which one of them ends has it, with its begin before."""
    before_ns = time.time_ns()
    late, done = log.open(5), log.open(5)
    done.close(5, 1)
    assert len(log.end()) == 1
    [since_ns] = log.pending_since_ns
    assert before_ns <= since_ns == late.begin_ns <= time.time_ns()
    log.begin(8)
    late.close(5, 1)
    [noted] = log.end()
    assert (noted.begin_ns, noted.response_tokens, log.pending_since_ns) == (since_ns, 1, [])


def test_counts_of_numpy_are_counts(log: RequestLog) -> None:
    with log.open() as request:
        request.prompt_tokens = request.response_tokens = request.cached_tokens = np.int64(5)  # type: ignore[assignment]
    [noted] = log.end()
    assert (noted.prompt_tokens, noted.response_tokens, noted.cached_tokens) == (5, 5, 5)
    assert msgspec.json.decode(msgspec.json.encode(noted), type=Request) == noted


def test_the_first_version_of_a_server_may_come_in_a_capture(log: RequestLog) -> None:
    log.begin(None)
    log.set_policy_version(3)
    log.set_policy_version(3)
    with log.open():
        pass
    assert ([noted.policy_version for noted in log.end()], log.policy_versions) == ([3], [3])


async def test_an_empty_prompt_is_refused_by_the_engine_itself(log: RequestLog) -> None:
    """SGLang's message reaches the client, and none of the log."""

    class Manager:
        async def generate_request(self, obj: Any) -> AsyncGenerator[Any, None]:
            raise ValueError("the input is empty")
            yield

    manager = Manager()
    watch_manager(manager, log)
    with pytest.raises(ValueError, match="the input is empty"):
        await anext(manager.generate_request(SimpleNamespace(input_ids=[], rid="a")))
    assert [noted.failed for noted in log.end()] == [True]
