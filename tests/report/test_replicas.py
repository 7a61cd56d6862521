"""What the requests of each replica came to, in the model and on every face."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_steps import whole_step

from verl_profiling.analysis import open_step
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import MANIFEST_NAME, CaptureResult, HostClock, Manifest, Request
from verl_profiling.report.capture_rows import replica_rows, requests
from verl_profiling.report.columns import ReplicaRow
from verl_profiling.report.html import render_html
from verl_profiling.run_files import write_json_atomically

BEGIN = 1_790_000_000_000_000_000
MS = 1_000_000


def manifest(served: Iterable[Request], offset_ns: int = 0) -> Manifest:
    """Return a manifest of one replica, whose host's clock is ahead by an offset."""
    identity = WorkerIdentity(role="rollout", replica=0, host="far", clock_domain="far")
    return Manifest(
        run_id="run",
        capture_id="run-1",
        step=1,
        steps=[1],
        begin_ns=BEGIN,
        end_ns=BEGIN + 10**9,
        controller=WorkerIdentity(role="controller"),
        workers=[CaptureResult(identity=identity, requests=list(served))],
        clocks=[HostClock(host="far", clock_domain="far", offset_ns=offset_ns)],
    )


def request(**changes: Any) -> Request:
    """Return a request of 100 ms: 10 on the way, 20 queued, 30 prefill, 35 decode, 5 on the way back."""
    times = {"begin_ns": 0, "arrival_ns": 10, "scheduled_ns": 30}
    times |= {"first_token_ns": 60, "last_token_ns": 95, "end_ns": 100}
    ms = {name: changes.get(name, at) for name, at in times.items()}
    ns = {name: 0 if at is None else BEGIN + at * MS for name, at in ms.items()}
    facts = {"prompt_tokens": 8, "response_tokens": 8, "cached_tokens": 2, "preemptions": 0}
    return Request(**{"replica": 0, "id": "r", **facts, **changes, **ns})


@pytest.mark.parametrize(
    ("changes", "to_first", "per_token"),
    [
        ({"last_token_ns": None}, 60_000, 40_000 / 7),
        ({"first_token_ns": None}, None, None),
        ({"response_tokens": 1}, 60_000, None),
        ({"response_tokens": 0}, 60_000, None),
    ],
)
def test_times_by_token_are_of_what_is_known(
    changes: dict[str, Any], to_first: float | None, per_token: float | None
) -> None:
    """Without the engine's last token the response's end counts; one token has no time behind it."""
    [row] = requests(manifest([request(**changes)]))
    assert (row.to_first_token_us, row.per_token_us) == (to_first, per_token)


def test_a_replica_has_its_percentiles_and_its_sums() -> None:
    """Times are of whole requests, cached tokens and preemptions of all."""
    served = [
        request(first_token_ns=60 + number, last_token_ns=95 + number, end_ns=200) for number in range(100)
    ]
    served += [request(failed=True, first_token_ns=99, cached_tokens=8, preemptions=3)]
    [row] = replica_rows(requests(manifest(served)))
    assert (row.worker, row.requests, row.failed, row.preemptions) == ("rollout0", 101, 1, 3)
    assert (row.queued_p50_us, row.queued_p90_us, row.queued_p99_us) == (20_000, 20_000, 20_000)
    to_first = (row.to_first_token_p50_us, row.to_first_token_p90_us, row.to_first_token_p99_us)
    assert to_first == pytest.approx((109_500, 149_100, 158_010))
    assert row.per_token_p50_us == row.per_token_p99_us == 5_000
    assert row.cache_hit_share == pytest.approx((100 * 2 + 8) / (101 * 8))


def test_what_the_engine_does_not_tell_is_unknown() -> None:
    """It is not zero, and requests that tell are not thinned by those that do not."""
    told = request(cached_tokens=4)
    unknown = {"arrival_ns": 0, "scheduled_ns": 0, "first_token_ns": 0, "last_token_ns": 0}
    silent = msgspec.structs.replace(told, **unknown, cached_tokens=None, preemptions=None)
    [row] = replica_rows(requests(manifest([silent, silent])))
    found = {name for name, value in msgspec.structs.asdict(row).items() if value is None}
    assert found == {*ReplicaRow.__struct_fields__} - {
        "worker",
        "replica",
        "requests",
        "failed",
        "validation",
    }
    [row] = replica_rows(requests(manifest([told, silent])))
    assert (row.cache_hit_share, row.preemptions, row.queued_p50_us) == (0.5, 0, 20_000)
    assert replica_rows([]) == []


def test_the_page_says_that_the_queue_is_not_known(tmp_path: Path) -> None:
    report = whole_step(tmp_path / "step_000001", ranks=2, replicas=2)
    silent = [
        msgspec.structs.replace(row, queued_p50_us=None, queued_p90_us=None, queued_p99_us=None)
        for row in report.replicas
    ]
    page = render_html(msgspec.structs.replace(report, replicas=silent))
    assert "How long requests were queued is not known" in page
    assert "queued p90" not in page
    assert 'id="replicas"' not in render_html(msgspec.structs.replace(report, replicas=[]))
    write_json_atomically(tmp_path / MANIFEST_NAME, manifest([request()], offset_ns=4 * MS))
    [row] = requests(open_step(tmp_path).manifest)
    assert (row.id, row.cached_tokens, row.preemptions) == ("r", 2, 0)
    assert (row.begin_us, row.arrival_us, row.scheduled_us) == (-4_000, 6_000, 26_000)
    assert (row.first_token_us, row.last_token_us, row.end_us) == (56_000, 91_000, 96_000)
    assert (row.to_first_token_us, row.per_token_us) == (60_000, 5_000)
