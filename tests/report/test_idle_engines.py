"""An engine without a request on its way waits for requests; only with one does its host fail to launch."""

from __future__ import annotations

from pathlib import Path

import drawn_steps
import pytest
from drawn_steps import Worker, report_of

from verl_profiling.report.model import Report


def engine(
    folder: Path,
    requests: list[tuple[float, float, int]],
    *,
    stage: str = "rollout",
    logged: bool = True,
    pending: tuple[float, ...] = (),
) -> Report:
    """An engine that computes from 0 to 1, from 4 to 5 and from 9 to 10 s of a stage of 10 s."""
    works = [(0, 1), (4, 5), (9, 10)]
    worker = drawn_steps.engine(0, *works, requests=requests, logged=logged, pending=list(pending))
    return report_of(folder, [(stage, 0, 10)] if stage else [], [worker])


def seconds(report: Report) -> dict[str, float]:
    [row] = report.workers
    return {cause: us / 1e6 for cause, us in row.lost_us.items() if us}


@pytest.mark.parametrize("stage", ["rollout", "validate", ""])
def test_time_without_a_request_is_no_time_of_the_host(tmp_path: Path, stage: str) -> None:
    """Between turns of a tool it waits for requests, in a rollout, a validation, or a loop without stages."""
    report = engine(tmp_path, [(0, 1, 4), (3, 6, 4), (9, 10, 4)], stage=stage)
    assert seconds(report) == {"no_requests": 5.0, "host_bound": 2.0}


def test_a_finding_is_about_what_is_waited_for(tmp_path: Path) -> None:
    """Requests, or between iterations with requests the engine."""
    report = engine(tmp_path, [(0, 1, 4), (4, 5, 4), (9, 10, 4)])
    [finding] = [finding for finding in report.findings if finding.rule == "no_requests"]
    assert "waited for requests" in finding.text
    assert "host_bound" not in {finding.rule for finding in report.findings}
    report = engine(tmp_path, [(0, 10, 4)])
    [finding] = [finding for finding in report.findings if finding.rule == "host_bound"]
    assert "between iterations of engines that had requests" in finding.text


def test_requests_before_and_after_the_capture_are_on_their_way(tmp_path: Path) -> None:
    """One that did not end is known by its begin, one from before while iterations show it."""
    report = engine(tmp_path, [(0, 1, 4)], pending=(4.0,))
    assert seconds(report) == {"no_requests": 3.0, "host_bound": 4.0}
    report = engine(tmp_path, [(9, 10, 4)])
    assert seconds(report) == {"host_bound": 3.0, "no_requests": 4.0}


def test_an_engine_that_got_no_request_had_none(tmp_path: Path) -> None:
    """An empty log is knowledge, too; what its iterations did was for requests from before."""
    assert "no_requests" not in seconds(engine(tmp_path, []))  # the last iteration ends with the rollout
    idle = Worker("rollout", replica=0, kernels=[("dummy", 0, 1), ("dummy", 9, 10)], logged=True)
    [row] = report_of(tmp_path, [("rollout", 0, 10)], [idle]).workers
    assert row.lost_us["no_requests"] == 8e6


def test_without_a_log_it_is_not_known_and_said(tmp_path: Path) -> None:
    """The gaps are the host's then; an open request is in the log."""
    report = engine(tmp_path, [], logged=False)
    assert seconds(report) == {"host_bound": 7.0}
    assert any("rollout0 were not logged" in note for note in report.notes)
    assert not any("not logged" in note for note in engine(tmp_path, [(0, 9, 1)]).notes)
    assert not any("not logged" in note for note in engine(tmp_path, [], pending=(8.0, 9.0)).notes)
