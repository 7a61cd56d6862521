"""Steps on other resources, held against engines that are run iteration by iteration."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from drawn_logs import DrawnLog
from drawn_steps import STAGES, Worker, drawn_inputs, engine, ns
from msgspec.structs import replace
from step_folders import rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError
from verl_profiling.files.run_files import read_manifest
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Request, StageSpan
from verl_profiling.predict.prediction import Prediction

_DRAWN = random.Random(3)
LENGTHS = [_DRAWN.randint(40, 400) for _ in range(32)]


def linear(running: int) -> float:
    """Return the seconds of an iteration of an engine that slows down with its requests."""
    return 0.004 + 0.001 * running


def flat(running: int) -> float:
    return 0.02


def served(
    lengths: Sequence[int],
    seconds: Callable[[int], float] = linear,
    slots: int = 99,
    begin: float = 0.1,
) -> list[tuple[float, float, float, int]]:
    """Run an engine; return when each request arrived, ran and ended, and its tokens."""
    now, waiting, running, found = begin, list(enumerate(lengths)), dict[int, int](), {}
    started: dict[int, float] = {}
    while waiting or running:
        while waiting and len(running) < slots:
            number, length = waiting.pop(0)
            running[number], started[number] = length, now
        now += seconds(len(running))
        for number in list(running):
            running[number] -= 1
            if not running[number]:
                found[number] = (begin, started[number], now, lengths[number])
                del running[number]
    return [found[number] for number in range(len(lengths))]


def drawn(folder: Path, *replicas: Sequence[tuple[float, float, float, int]]) -> float:
    """Draw a step whose rollout is of such replicas; return its end: 3 s after the rollout."""
    last = max(end for one in replicas for _, _, end, _ in one)
    stages = [
        ("rollout", 0, last),
        ("update_actor", last, last + 2),
        ("update_weights", last + 2, last + 3),
    ]
    drawn_inputs(
        folder, stages, [engine(at, (0.1, 0.2)) for at in range(len(replicas))], end=last + 3
    )
    for at, requests in enumerate(replicas):
        made = [
            Request(
                replica=at,
                id=f"{at}.{number}",
                begin_ns=ns(begin),
                arrival_ns=ns(begin),
                scheduled_ns=ns(started),
                end_ns=ns(end),
                prompt_tokens=9,
                response_tokens=tokens,
            )
            for number, (begin, started, end, tokens) in enumerate(requests)
        ]
        rewrite_worker(folder, f"rollout{at}", requests=made)
    return last + 3


def has(found: Prediction, seconds: float) -> bool:
    assert found.low_us is not None
    assert found.high_us is not None
    assert found.low_us <= found.predicted_us <= found.high_us
    return found.low_us <= seconds * 1e6 <= found.high_us


@pytest.mark.parametrize("seconds", [linear, flat])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 4)])
def test_a_step_on_other_replicas(
    tmp_path: Path, seconds: Callable[[int], float], before: int, after: int
) -> None:
    """The interval holds the truth; with more replicas,
    it is at most half as wide as all that could be.
    """
    step = drawn(tmp_path, *(served(LENGTHS[at::before], seconds) for at in range(before)))
    truth = 3 + max(
        end for at in range(after) for _, _, end, _ in served(LENGTHS[at::after], seconds)
    )
    found = open_step(tmp_path).what_if(replicas=after)
    assert found.changes == [f"--replicas {after}"]
    assert f"the capture has all replicas of the run: {before}" in found.assumed
    assert has(found, truth), (found.low_us, truth, found.high_us)
    all_ends = step, 3 + (step - 3) * before / after
    if after > before:
        assert found.high_us - found.low_us <= 0.5 * abs(all_ends[1] - all_ends[0]) * 1e6
    else:
        assert found.notes[0].startswith("extrapolated: a replica ran")


@pytest.mark.parametrize("slots", [4, 16])
def test_a_step_with_another_limit_of_requests(tmp_path: Path, slots: int) -> None:
    """The interval holds the truth, for fewer requests at once and for more."""
    drawn(tmp_path, served(LENGTHS, slots=8))
    found = open_step(tmp_path).what_if(concurrency=slots)
    truth = 3 + max(end for _, _, end, _ in served(LENGTHS, slots=slots))
    assert found.changes == [f"--concurrency {slots}"]
    assert has(found, truth), (found.low_us, truth, found.high_us)
    assert not any("as in the capture, where others queued" in one for one in found.assumed)


@pytest.mark.parametrize(
    ("seconds", "wanted", "text"),
    [
        (linear, "about 8", "beyond, twice as many make under 25% more tokens/s"),
        (flat, "over 32", "twice as many made 100% more tokens/s"),
    ],
)
def test_the_report_says_how_many_requests_a_replica_should_get(
    tmp_path: Path, seconds: Callable[[int], float], wanted: str, text: str
) -> None:
    """With an iteration of 4 ms and 1 ms a request, 16 requests make a fifth more than 8."""
    drawn(tmp_path, served(LENGTHS, seconds))
    loop = WorkerIdentity(role="agent_loop")  # in whose process the engine of a replay is
    rewrite_worker(tmp_path, "rollout0", artifacts=[], identity=loop)
    knee = open_step(tmp_path).report().knee
    assert knee is not None
    assert (knee.wanted, knee.sentence) == (wanted, text)


def test_requests_that_all_run_at_once_say_nothing_of_an_engine(tmp_path: Path) -> None:
    """The interval has all between no change and a rollout in proportion to the requests."""
    for seconds in (linear, flat):
        step = drawn(tmp_path, served([150] * 16, seconds))
        found = open_step(tmp_path).what_if(replicas=2)
        assert has(found, step)
        assert has(found, 3 + (step - 3) / 2)
        assert "ran 16 to 16 requests at once in the capture, and runs 8 to 8" in found.notes[0]


def test_a_full_engine_has_as_many_slots_as_it_ran_requests(tmp_path: Path) -> None:
    """Requests queue for a slot, and two replicas have twice as many."""
    drawn(tmp_path, served(LENGTHS, slots=8))
    found = open_step(tmp_path).what_if(replicas=2)
    truth = 3 + max(end for at in (0, 1) for _, _, end, _ in served(LENGTHS[at::2], slots=8))
    assert has(found, truth)
    assert (
        "a replica runs at most 8 requests at once, as in the capture, where others queued"
        in found.assumed
    )


def test_requests_of_a_trajectory_follow_each_other(tmp_path: Path) -> None:
    """Eight trajectories of two turns with a tool between them, all at the same time."""
    log = DrawnLog()
    requests = []
    for sample in range(8):
        number = log.trajectory(0.1, 5.1)
        for turn, (begin, end) in enumerate([(0.1, 2.1), (3.1, 5.1)]):
            log.span("generate", begin, end, number, request=f"{sample}.{turn}")
            requests.append((begin, begin, end, 100))
        log.span("tool:search", 2.1, 3.1, number)
    drawn(tmp_path, requests)
    names = [f"{sample}.{turn}" for sample in range(8) for turn in range(2)]
    worker = read_manifest(tmp_path).workers[0]
    named = [replace(one, id=name) for one, name in zip(worker.requests, names, strict=True)]
    rewrite_worker(tmp_path, "rollout0", requests=named)
    log.add_to(tmp_path)
    found = open_step(tmp_path).what_if(replicas=8)
    assert found.low_us == pytest.approx(0.97 * (0.1 + 2 / 8 + 1 + 2 / 8 + 3) * 1e6)
    assert found.high_us == pytest.approx(1.03 * 8.1e6)


def test_a_step_one_step_off(tmp_path: Path) -> None:
    """The longer one of rollout and training, with the weight update;
    the loop's own 0.2 s may be in both.
    """
    workers = [
        Worker("rollout", replica=0, stages=[("rollout", 0.1, 3.9)]),
        Worker("actor", stages=[("update_actor", 5, 8)], kernels=[("gemm", 5.2, 5.4)]),
    ]
    drawn_inputs(tmp_path, STAGES, workers)
    step = open_step(tmp_path)
    for changes, likely, low, high in (
        ({}, 6.0, 6.0, 6.2),
        ({"scale": {"rollout": 2.0}}, 9.0, 9.0, 9.0),
        ({"scale": {"update_actor": 2.0}}, 9.0, 9.0, 9.2),
    ):
        found = step.what_if(steps_ahead=1, **changes)
        assert found.predicted_us == pytest.approx(likely * 1e6)
        assert found.low_us == pytest.approx(0.97 * low * 1e6)
        assert found.high_us == pytest.approx(1.03 * high * 1e6)
        assert sum(row.duration_us for row in found.path) == pytest.approx(found.predicted_us)


def test_steps_without_what_other_resources_need_are_refused(tmp_path: Path) -> None:
    drawn(tmp_path, served(LENGTHS))
    step = open_step(tmp_path)
    with pytest.raises(ConfigError, match="0 is not an integer of at least 1"):
        step.what_if(replicas=0)
    rewrite_worker(tmp_path, "rollout0", requests=[])
    for changes, said in (
        (
            {"replicas": 2},
            "needs requests with tokens and own ends in the step, as rollout.requests logs",
        ),
        (
            {"steps_ahead": 1},
            "needs a step whose rollout begins and ends in it, with engines recorded",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            open_step(tmp_path).what_if(**changes)


@pytest.mark.parametrize("goes_on", ["request", "open request", "stage"])
def test_a_step_that_a_rollout_goes_on_after_is_refused(tmp_path: Path, goes_on: str) -> None:
    drawn(tmp_path, served(LENGTHS))
    worker = read_manifest(tmp_path).workers[0]
    late = replace(worker.requests[0], id="late", end_ns=ns(99))
    more = {
        "request": {"requests": [*worker.requests, late]},
        "open request": {"pending_since_ns": [ns(2)]},
        "stage": {"stages": [StageSpan(name="rollout", begin_ns=ns(11), end_ns=ns(99))]},
    }
    rewrite_worker(tmp_path, "rollout0", **more[goes_on])
    step = open_step(tmp_path)
    with pytest.raises(
        ConfigError, match="needs a step in which all requests of its rollout begin and end"
    ):
        step.what_if(replicas=2)
    with pytest.raises(ConfigError, match="needs a step whose rollout begins and ends in it"):
        step.what_if(steps_ahead=1)


def test_validation_is_no_rollout(tmp_path: Path) -> None:
    """Its ten requests are as before, as is the rest of the step;
    a tail of the rollout is 1.5 s.
    """
    requests = [
        (begin + 0.1, begin + 0.5 + 0.3 * at * speed, 50 * (at + 3))
        for begin, speed in ((0, 1), (7, 0.7))
        for at in range(10)
    ]
    stages = [("rollout", 0, 4), ("update_actor", 4, 7), ("validate", 7, 9.5)]
    drawn_inputs(tmp_path, stages, [engine(0, (0.1, 0.2), requests=requests)])
    step = open_step(tmp_path)
    assert step.what_if(no_tail=50).predicted_us == pytest.approx(8.5e6)
    path = step.what_if(replicas=4).path
    assert sum(row.duration_us for row in path if row.stage == "validate") == pytest.approx(2.5e6)


def test_an_engine_that_serves_one_at_a_time_is_refused(tmp_path: Path) -> None:
    log = DrawnLog()
    for number, end in enumerate([3, 5]):
        log.trajectory(1, end)
        log.span("generate", 1, end, number, request=f"0-{number}")
    requests = [(1, 3, 9), (3, 5, 9)]
    drawn_inputs(tmp_path, [("rollout", 0, 6)], [Worker("rollout", replica=0, requests=requests)])
    log.add_to(tmp_path)
    with pytest.raises(
        ConfigError, match=r"several requests at once; raise their limit .*capture again"
    ):
        open_step(tmp_path).what_if(replicas=2)


def test_the_command_prints_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn(tmp_path, served(LENGTHS))
    assert main(["what-if", str(tmp_path), "--replicas", "2", "--async", "1"]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "step 1: 12.3 s, predicted 6.90 s (between 6.2" in lines
    assert "with --replicas 2 --async 1" in lines
    for options, said in (
        (["--async", "2"], "--async: 2 is not 0 or 1"),
        (["--async", "-1"], "--async: -1 is not 0 or 1"),
    ):
        with contextlib.suppress(SystemExit):
            assert main(["what-if", str(tmp_path), *options]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert main(["what-if", str(tmp_path), "--replicas", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["low_us"] < found["predicted_us"] < found["high_us"]
