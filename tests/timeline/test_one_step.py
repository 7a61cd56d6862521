"""The steps of a continuous capture are told apart in every number."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from drawn_steps import Worker, drawn_inputs, engine, ns
from step_folders import build_step, rewrite, rewrite_worker
from step_outcome import printed

from verl_profiling.analysis import load_reports, open_run, open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError
from verl_profiling.integrations.verl.profiler import log_reports
from verl_profiling.manifest import MANIFEST_NAME, MAX_NS, StepSpan
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.steps.read import Content, read_step
from verl_profiling.steps.step import StepInputs

STEPS = [
    StepSpan(step=2, begin_ns=ns(0), end_ns=ns(5), policy_version=1, metrics={"tokens": 500.0}),
    StepSpan(step=3, begin_ns=ns(8), end_ns=ns(10), policy_version=2, metrics={"tokens": 640.0}),
]
STAGES = [
    *[("rollout", 0, 3), ("update_actor", 3, 5)],
    ("validate", 5, 8),
    *[("rollout", 8, 9), ("update_actor", 9, 10)],
]


def capture(folder: Path, steps: list[StepSpan] = STEPS) -> Path:
    """Two steps of 5 s and 2 s in one folder, and 3 s of validation between them."""
    folder = folder / "step_000002"
    folder.mkdir(parents=True)
    actor = Worker(
        "actor",
        stages=[("update_actor", 3, 5), ("update_actor", 9, 10)],
        kernels=[("gemm", 3, 4), ("gemm", 9, 10)],
        tool=[("start", -1, -0.5, None), ("stop", 10, 13, None)],
    )
    requests = [(0, 3, 40), *[(5, 8, 9)] * 4, (8, 8.5, 20), (8, 8.25, 20)]
    replica = engine(0, (0, 3), (5, 7.9), (8, 8.5), requests=requests)
    drawn_inputs(folder, STAGES, [actor, replica], steps=steps)
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return load_reports(capture(tmp_path_factory.mktemp("captured")))


def test_each_step_has_its_own_stages(reports: list[Report]) -> None:
    found = [(one.step, one.policy_version, one.span_us) for one in reports]
    assert found == [(2, 1, 5e6), (3, 2, 2e6)]
    around = [[(row.name, row.duration_us) for row in one.around_the_step] for one in reports]
    assert around == [[("validate", 3e6)], []]
    for report in reports:
        assert sum(row.share for row in report.stages if row.depth == 0) == pytest.approx(1.0)
        assert "validate" not in {row.name for row in report.stages}
    stages = [(row.name, row.begin_us, row.duration_us) for row in reports[1].stages]
    assert [row for row in stages if row[2]] == [
        ("rollout", 0.0, 1e6),
        ("update_actor", 1e6, 1e6),
    ]


def test_each_step_has_its_own_requests(reports: list[Report]) -> None:
    tails = [(one.tail.requests, one.tail.last_finish_us) for one in reports]
    assert tails == [(1, 3e6), (2, 0.5e6)]
    assert [[row.requests for row in one.replicas] for one in reports] == [[1], [2]]
    assert [[row.iterations for row in one.engines] for one in reports] == [[1], [1]]
    tokens = [(one.throughput.tokens, one.throughput.tokens_per_s) for one in reports]
    assert tokens == [(500.0, 100.0), (640.0, 320.0)]
    assert [one.metrics for one in reports] == [{"tokens": 500.0}, {"tokens": 640.0}]


def test_each_step_has_its_own_work(reports: list[Report]) -> None:
    busy = [[row.busy_us for row in one.workers] for one in reports]
    assert busy == [[1e6, 3e6], [1e6, 0.5e6]]
    for report in reports:
        for row in report.workers:
            assert row.span_us == report.span_us
            assert sum(row.lost_us.values()) == pytest.approx(row.idle_us + row.waiting_us)
    kernels = {row.name: row.self_us for row in reports[1].kernels}
    assert kernels == {"gemm": 1e6, "attention": 0.5e6}
    costs = [{row.worker: (row.start_s, row.stop_s) for row in one.costs} for one in reports]
    assert [each["actor_rank0"] for each in costs] == [(0.5, 0.0), (0.0, 3.0)]


def test_validation_inside_of_a_step_is_no_rollout(tmp_path: Path) -> None:
    """Its requests are counted apart, its iterations are none of the rollout's,
    and it is a stage.
    """
    whole = StepSpan(step=2, begin_ns=ns(0), end_ns=ns(10))
    [report] = load_reports(capture(tmp_path, [whole]))
    assert [(row.requests, row.validation) for row in report.replicas] == [(3, 4)]
    assert report.tail.requests == 3
    assert report.throughput.tokens == 3 * 10 + 80
    assert [row.iterations for row in report.engines] == [2]
    assert "validate" in {row.name for row in report.stages}


def test_the_api_asks_which_step_is_meant(tmp_path: Path) -> None:
    """A table has all of them, a report is of one."""
    [step] = open_run(capture(tmp_path)).steps()
    with pytest.raises(ConfigError, match=r"step 2, step 3.*by_step"):
        step.report()
    assert [part.report().step for part in step.by_step()] == [2, 3]
    frame = step.to_frame("workers")
    assert frame.groupby("step").size().to_dict() == {2: 2, 3: 2}
    assert step.to_frame("requests")["step"].tolist() == [2, 3, 3]


def test_every_face_has_both_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = capture(tmp_path)
    assert main(["report", str(folder)]) == 0
    assert "step 2, policy version 1\nStep: 5.00 s" in (shown := capsys.readouterr().out)
    assert "step 3, policy version 2\nStep: 2.00 s" in shown
    assert main(["report", str(tmp_path), "--save", "--json", "--csv", str(tmp_path / "csv")]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["step"], r["span_us"]) for r in found] == [(2, 5e6), (3, 2e6)]
    assert {path.name for path in folder.glob("report*.html")} == {
        "report.step_000002.html",
        "report.step_000003.html",
    }
    index = (tmp_path / "index.html").read_text()
    assert "step_000002/report.step_000003.html" in index
    with (tmp_path / "csv" / "stages.csv").open() as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"2", "3"}


def test_trackers_get_each_step_under_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """91 tokens per second of a capture is a number of no step;
    steps after a damaged one are logged.
    """

    def read(inputs: StepInputs) -> Content:
        if inputs.step == 1:
            raise OSError("stale file handle")
        return read_step(inputs)

    monkeypatch.setattr("verl_profiling.steps.read.read_step", read)

    class Tracker:
        def __init__(self) -> None:
            self.logged: dict[int, dict[str, float]] = {}

        def log(self, data: dict[str, float], step: int) -> None:
            self.logged[step] = data

    file, wandb = Tracker(), Tracker()
    damaged = build_step(tmp_path, step=1)
    log_reports({"file": file, "wandb": wandb}, capture(tmp_path).parent, 5)
    assert f"no report can be made of {damaged}: stale" in caplog.text
    assert wandb.logged == {5: file.logged[3]}
    assert {step: data["profiling/step_s"] for step, data in file.logged.items()} == {
        2: 5.0,
        3: 2.0,
    }
    assert [data["profiling/tokens_per_s"] for data in file.logged.values()] == [100.0, 320.0]


def test_mlflow_takes_the_numbers_of_each_step(tmp_path: Path) -> None:
    """Real MLflow: it refuses names with other characters than its own."""
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")

    class Tracker:
        def log(self, data: dict[str, float], step: int) -> None:
            mlflow.log_metrics(data, step=step)

    with mlflow.start_run() as run:
        log_reports({"mlflow": Tracker()}, capture(tmp_path).parent, 5)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "profiling/step_s")
    assert {metric.step: metric.value for metric in history} == {2: 5.0, 3: 2.0}


def test_a_continuous_capture_is_compared_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side has two steps, so the noise is known."""
    a, b = (capture(tmp_path / side) for side in ("a", "b"))
    assert main(["diff", str(a), str(b), "--json"]) == 0
    diff = json.loads(capsys.readouterr().out)
    assert (diff["before"], diff["after"]) == (2, 2)
    step = next(change for change in diff["changes"] if change["kind"] == "step")
    assert (step["before_s"], step["noise_s"]) == (3.5, 1.5)


def test_the_timeline_marks_the_steps(tmp_path: Path) -> None:
    """With a row of them; asked for it, the second step's holds nothing of the first."""
    step = open_step(capture(tmp_path))
    timeline = json.loads(gzip.decompress(step.merge().path.read_bytes()))
    spans = {e["name"]: e["dur"] for e in timeline["traceEvents"] if e.get("cat") == "step"}
    assert spans == {"step 2": 5e6, "step 3": 2e6}
    _, second = step.by_step()
    path = second.merge().path
    assert path.name == "timeline.step_000003.json.gz"
    timeline = json.loads(gzip.decompress(path.read_bytes()))
    names = [
        e["name"] for e in timeline["traceEvents"] if e["ph"] == "X" and e.get("cat") == "kernel"
    ]
    assert sorted(names) == ["attention", "gemm"]


def test_discrete_artifacts_of_other_steps_are_not_read(tmp_path: Path) -> None:
    """An artifact belongs to the steps in which it was recorded."""
    folder = capture(tmp_path)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    for worker in manifest["workers"]:
        worker["mode"] = "discrete"
        for artifact in worker["artifacts"]:
            artifact["begin_ns"], artifact["end_ns"] = ns(8), ns(9)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    first, second = open_step(folder).by_step()
    assert (first.inputs.sources, len(second.inputs.sources)) == ([], 2)
    assert [row.span_us for row in second.report().workers] == [1e6, 1e6]
    assert first.report().coverage.missing == []


@pytest.mark.parametrize(
    "steps",
    [
        [STEPS[1], STEPS[0]],
        [STEPS[0], STEPS[0]],
        [STEPS[0], StepSpan(step=3, begin_ns=ns(4), end_ns=ns(10))],
        [STEPS[0], StepSpan(step=3, begin_ns=ns(8), end_ns=ns(7))],
        [StepSpan(step=-5, begin_ns=-MAX_NS, end_ns=MAX_NS), STEPS[1]],
    ],
    ids=["backwards", "twice", "overlapping", "negative", "everything"],
)
def test_steps_that_cannot_be_are_not_told_apart(tmp_path: Path, steps: list[StepSpan]) -> None:
    """A damaged or hostile manifest is reported on as one capture."""
    [report] = load_reports(capture(tmp_path, steps))
    assert report.span_us == 10e6


def test_the_last_step_of_a_killed_run_ends_with_what_was_recorded(tmp_path: Path) -> None:
    """When it began is known, when it would have ended is not."""
    folder = capture(tmp_path, [STEPS[0], StepSpan(step=3, begin_ns=ns(8), end_ns=ns(8))])
    rewrite(folder, state="begun")
    assert [report.span_us for report in load_reports(folder)] == [5e6, 2e6]


def test_numbers_of_the_whole_capture_are_said_to_be(tmp_path: Path) -> None:
    """Sizes, events and notes are known of all steps together;
    a capture of one step says nothing.
    """
    folder = capture(tmp_path)
    rewrite(folder, steps=[2, 3])
    rewrite_worker(folder, "rollout0", notes=["rollout0: 80 requests"])
    for report in load_reports(tmp_path):
        assert report.capture_steps == [2, 3]
        assert "of the whole capture, steps 2, 3: rollout0: 80 requests" in report.notes
        assert "events (of the whole capture, steps 2, 3)" in " ".join(printed(report).split())
        assert "events (of the whole capture, steps 2, 3)" in render_html(report)
    assert load_reports(capture(tmp_path / "alone", STEPS[:1]))[0].capture_steps == []
