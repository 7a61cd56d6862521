"""What the requests of each replica came to, in the model and on every face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_logs import MS
from drawn_steps import BASE, Worker, drawn_inputs, whole_step
from step_folders import rewrite, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import HostClock, Request
from verl_profiling.report.columns import ReplicaRow
from verl_profiling.report.html import render_html

KNOWN = {"worker", "replica", "requests", "failed", "validation"}


def request(**changes: Any) -> Request:
    """Return a request of 100 ms: 10 on the way, 20 queued, 30 prefill, 35 decode, 5 on the way back."""
    times = {"begin_ns": 0, "arrival_ns": 10, "scheduled_ns": 30}
    times |= {"first_token_ns": 60, "last_token_ns": 95, "end_ns": 100}
    ms = {name: changes.get(name, at) for name, at in times.items()}
    ns = {name: 0 if at is None else BASE + at * MS for name, at in ms.items()}
    facts = {"prompt_tokens": 8, "response_tokens": 8, "cached_tokens": 2, "preemptions": 0}
    return Request(**{"replica": 0, "id": "r", **facts, **changes, **ns})


def replicas(folder: Path, *served: Request) -> list[ReplicaRow]:
    drawn_inputs(folder, [("rollout", 0, 10)], [Worker("rollout", replica=0)])
    rewrite_worker(folder, "rollout0", requests=list(served))
    return open_step(folder).report().replicas


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
    changes: dict[str, Any], to_first: float | None, per_token: float | None, tmp_path: Path
) -> None:
    """Without the engine's last token the response's end counts; one token has no time behind it."""
    [row] = replicas(tmp_path, request(**changes))
    assert (row.to_first_token_p50_us, row.per_token_p50_us) == (to_first, per_token)


def test_a_replica_has_its_percentiles_and_its_sums(tmp_path: Path) -> None:
    """Times are of whole requests, cached tokens and preemptions of all."""
    served = [
        request(first_token_ns=60 + number, last_token_ns=95 + number, end_ns=200) for number in range(100)
    ]
    served += [request(failed=True, first_token_ns=99, cached_tokens=8, preemptions=3)]
    [row] = replicas(tmp_path, *served)
    assert (row.worker, row.requests, row.failed, row.preemptions) == ("rollout0", 101, 1, 3)
    assert (row.queued_p50_us, row.queued_p99_us) == (20_000, 20_000)
    assert (row.to_first_token_p50_us, row.to_first_token_p99_us) == pytest.approx((109_500, 158_010))
    assert row.per_token_p50_us == row.per_token_p99_us == 5_000
    assert row.cache_hit_share == pytest.approx((100 * 2 + 8) / (101 * 8))


def test_what_the_engine_does_not_tell_is_unknown(tmp_path: Path) -> None:
    """It is not zero, and requests that tell are not thinned by those that do not."""
    told = request(cached_tokens=4)
    unknown = {"arrival_ns": 0, "scheduled_ns": 0, "first_token_ns": 0, "last_token_ns": 0}
    silent = msgspec.structs.replace(told, **unknown, cached_tokens=None, preemptions=None)
    [row] = replicas(tmp_path, silent, silent)
    found = {name for name, value in msgspec.structs.asdict(row).items() if value is None}
    assert found == {*ReplicaRow.__struct_fields__} - KNOWN
    [row] = replicas(tmp_path, told, silent)
    assert (row.cache_hit_share, row.preemptions, row.queued_p50_us) == (0.5, 0, 20_000)
    assert replicas(tmp_path) == []


def test_the_page_leaves_out_a_queue_that_is_not_known(tmp_path: Path) -> None:
    report = whole_step(tmp_path / "step_000001", ranks=2, replicas=2)
    unknown = dict.fromkeys(("queued_p50_us", "queued_p99_us"))
    silent = [msgspec.structs.replace(row, **unknown) for row in report.replicas]
    page = render_html(msgspec.structs.replace(report, replicas=silent))
    assert "queued p99" not in page
    assert 'id="replicas"' not in render_html(msgspec.structs.replace(report, replicas=[]))


def test_requests_are_on_the_clock_of_the_controller(tmp_path: Path) -> None:
    drawn_inputs(tmp_path, [], [Worker("rollout", replica=0)])
    far = WorkerIdentity(role="rollout", replica=0, host="far", clock_domain="far")
    rewrite_worker(tmp_path, "rollout0", identity=far, requests=[request()])
    rewrite(tmp_path, clocks=[HostClock(host="far", clock_domain="far", offset_ns=4 * MS)])
    [row] = open_step(tmp_path).to_frame("requests").to_dict("records")
    assert [row[f"{name}_us"] for name in ("begin", "arrival", "end")] == [-4_000, 6_000, 96_000]
    assert (row["to_first_token_us"], row["per_token_us"]) == (60_000, 5_000)
