"""Why a run with more lanes is not as many times faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from drawn_steps import Worker, drawn_inputs, in_group
from msgspec.structs import replace

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.manifest import MANIFEST_NAME, Work
from verl_profiling.report.diff import Diff, compare
from verl_profiling.report.model import Report


def step_of(
    folder: Path,
    work_s: Sequence[float],
    *,
    tokens: int = 0,
    whole: int = 0,
    batches: int = 1,
    fixed_s: float = 1.0,
    sync_s: float = 0.0,
    sent_s: float = 0.0,
    wait_s: float = 0.0,
) -> Path:
    """Draw a step of ranks that work, meet in a collective, and are alone at its begin and end.

    The step has 0.5 s of the loop's own in ``update_actor``.
    """
    ranks, longest = list(range(len(work_s))), max(work_s)
    end = 0.5 + longest + sent_s
    stages = [("update_actor", 0, end), ("advantage", end, end + fixed_s)]
    at = end + fixed_s
    for name, took_s in (("update_weights", sync_s), ("wait:reward", wait_s)):
        if took_s:
            stages.append((name, at, at + took_s))
            at += took_s
    workers = []
    for rank, own_s in enumerate(work_s):
        meeting = in_group(("ncclDevKernel_AllReduce", 0.5 + own_s, end), ranks)
        kernels = [("gemm", 0.5, 0.5 + own_s), *([meeting] if end > 0.5 + own_s else [])]
        workers.append(Worker("actor", rank, stages=[("update_actor", 0.5, end)], kernels=kernels))
    folder.mkdir(parents=True)
    manifest = drawn_inputs(folder, stages, workers, at).manifest
    if tokens:
        work = Work(tokens=tokens, samples=8, micro_batches=batches)
        each = [
            replace(worker, stages=[replace(span, work=work) for span in worker.stages])
            for worker in read_manifest(folder).workers
        ]
        write_json_atomically(folder / MANIFEST_NAME, replace(manifest, workers=each))
    if whole:
        manifest = replace(read_manifest(folder), metrics={"perf/total_num_tokens": whole})
        write_json_atomically(folder / MANIFEST_NAME, manifest)
    return folder


def report_of(path: Path) -> Report:
    return open_step(path).report()


def compared(tmp_path: Path, before: dict, after: dict) -> Diff:
    return compare(
        [report_of(step_of(tmp_path / "a/step_000001", **before))],
        [report_of(step_of(tmp_path / "b/step_000001", **after))],
    )


def parts_of(diff: Diff) -> dict[str, float]:
    """Return the parts (s) to the millisecond; they add up to what is missing."""
    assert diff.scaling is not None
    parts = diff.scaling.parts_s
    assert sum(parts.values()) == pytest.approx(diff.scaling.missing_s)
    return {name: round(s, 3) for name, s in parts.items() if abs(s) >= 0.001}


def test_the_missing_speed_up_is_divided_among_its_reasons(tmp_path: Path) -> None:
    """Of 4 s of work on one rank: halves of 2 s, but for what is planted."""
    diff = compared(
        tmp_path,
        {"work_s": [4.0], "tokens": 800},
        {
            "work_s": [2.0, 2.6],
            "tokens": 400,
            "sent_s": 0.2,
            "sync_s": 0.3,
            "wait_s": 0.1,
        },
    )
    assert parts_of(diff) == {
        "fixed part of advantage": 0.5,
        "fixed part of update_actor": 0.25,
        "tail of update_actor": 0.3,
        "smaller batches in update_actor": 0.3,
        "communication of update_actor": 0.2,
        "sync of update_weights": 0.3,
        "wait of wait:reward": 0.1,
    }
    assert diff.scaling is not None
    assert diff.scaling.sentence.startswith(
        "2 times the lanes, 1.00 times the tokens, 1.17 times as fast; 1.95 s a step are "
        "missing: fixed part of advantage 500 ms, "
    )
    assert diff.scaling.sentence.endswith("unexplained 0%")


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        # each rank has all tokens
        (
            {"tokens": 800, "whole": 800},
            {"work_s": [4.0, 4.0], "tokens": 800, "whole": 800},
            {"does not scale": 2.0},
        ),
        # as many tokens in micro-batches of the same size
        (
            {"tokens": 800, "batches": 4},
            {"work_s": [2.5, 2.5], "tokens": 400, "batches": 2},
            {"time per token of": 0.5},
        ),
        ({}, {"work_s": [4.0, 4.0]}, {"does not scale": 2.0}),
        ({}, {"work_s": [2.5, 2.5]}, {"unexplained": 0.5}),
        # twice the tokens on twice the lanes: nothing is missing
        ({"tokens": 400}, {"work_s": [4.0, 4.0], "tokens": 400}, {}),
    ],
)
def test_work_grows_for_reasons_that_the_facts_tell(
    tmp_path: Path, before: dict, after: dict, parts: dict[str, float]
) -> None:
    """Without tokens the growth is unexplained, and the sentence says what to pass."""
    both = {"fixed_s": 0.0}
    diff = compared(tmp_path, {"work_s": [4.0], **both, **before}, {**both, **after})
    found = {
        name: s
        for name, s in parts_of(diff).items()
        if name not in ("fixed part of update_actor", "(all others)")
    }
    assert [s for _, s in found.items()] == pytest.approx(list(parts.values()))
    assert all(part in name for part, name in zip(parts, found, strict=True))
    assert diff.scaling is not None
    hint = 'pass its work: with stage("update_actor").given(lengths=lengths)'
    assert (hint in diff.scaling.sentence) == ("unexplained" in parts)
    known = "if the steps have as many tokens" not in diff.scaling.sentence
    assert known == ("tokens" in before)


def test_a_fact_that_a_step_lacks_is_no_zero(tmp_path: Path) -> None:
    """Neither the tokens of a step, nor a worker of it."""
    known = {"work_s": [2.0, 2.0], "whole": 800}
    before = report_of(step_of(tmp_path / "a/step_000001", [4.0], whole=800))
    after = [report_of(step_of(tmp_path / "b/step_000001", **known))]
    after.append(report_of(step_of(tmp_path / "b/step_000002", [2.0, 2.0])))
    scaling = compare([before], after).scaling
    assert scaling is not None
    assert (scaling.lanes, scaling.tokens) == (2, 1)
    less = report_of(step_of(tmp_path / "c/step_000002", [2.0]))
    assert compare([after[0], less], after).scaling is None


@pytest.mark.parametrize(
    ("each", "part"), [((800, 400), "smaller batches in update_actor"), ((0, 0), "unexplained")]
)
def test_the_work_of_the_loop_is_that_of_no_lane(
    tmp_path: Path, each: tuple[int, int], part: str
) -> None:
    """The loop passes the lengths of all lanes; they do not tell that a stage does not scale."""
    reports = []
    for name, work_s, tokens in (("a", [4.0], each[0]), ("b", [2.6, 2.6], each[1])):
        folder = step_of(tmp_path / name / "step_000001", work_s, tokens=tokens, fixed_s=0.0)
        manifest = read_manifest(folder)
        work = Work(tokens=800, samples=8)
        stages = [replace(span, work=work) for span in manifest.stages]
        write_json_atomically(folder / MANIFEST_NAME, replace(manifest, stages=stages))
        reports.append(report_of(folder))
    diff = compare(reports[:1], reports[1:])
    assert diff.scaling is not None
    assert diff.scaling.tokens == 1
    assert parts_of(diff) == {"fixed part of update_actor": 0.25, part: 0.6}


def test_of_nothing_that_is_missing_no_part_has_a_share(tmp_path: Path) -> None:
    """More than twice as fast on two lanes: some parts still did not scale."""
    diff = compared(tmp_path, {"work_s": [4.0]}, {"work_s": [1.0, 1.0]})
    assert diff.scaling is not None
    assert diff.scaling.sentence.endswith("2.20 times as fast: nothing is missing")
    parts = {row.name: row for row in diff.changes if row.kind == "missing"}
    assert parts["fixed part of advantage"].change_s == pytest.approx(0.5)
    assert {row.change_share for row in parts.values()} == {None}


def test_diff_prints_the_reasons_of_runs_with_more_lanes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many or fewer lanes have no such table."""
    before = step_of(tmp_path / "a/step_000001", [4.0])
    after = step_of(tmp_path / "b/step_000001", [2.0, 2.0], sync_s=1.0)
    main(["diff", str(before), str(after)])
    text = capsys.readouterr().out
    assert "2 times the lanes, if the steps have as many tokens, 1.22 times as fast" in text
    assert "The missing speed-up, by part" in text
    assert "sync of update_weights" in text
    main(["diff", str(after), str(before)])
    assert "missing" not in capsys.readouterr().out
