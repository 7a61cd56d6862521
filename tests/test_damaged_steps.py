"""``check`` names all damage, and one step's damage costs that step alone:
the other steps are used.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import RunPython
from drawn_logs import add_log
from step_folders import build_step, rewrite, rewrite_worker

from verl_profiling.analysis import load_reports, open_run
from verl_profiling.cli import main
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.files.trajectory_log import (
    Block,
    LoopRecord,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, NsysRange, RunInfo, StageSpan
from verl_profiling.steps.check import check

Damage = Callable[[Path], object]
Part = tuple[str, int, int]


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))


def _typed_wrongly(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "workers": {"0": "actor"}}))


DAMAGES: dict[str, Damage] = {
    "no UTF-8": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"run_id": "', b'"run_id": "\xff')
    ),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "empty": lambda path: path.write_bytes(b""),
    "a list": lambda path: path.write_text("[]"),
    "nested": lambda path: path.write_text('{"metrics":' * 100_000),
    "wrong types": _typed_wrongly,
    "newer": _newer,
    "gone": lambda path: path.unlink(),
    "a folder": _folder,
    "a pipe": _pipe,
    "40 GB of holes": lambda path: os.truncate(path, 40 << 30),
    "a stage that is too deep": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"depth": 0', b'"depth": 1099511627776')
    ),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run of three steps, of which the manifest of the second is damaged."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        build_step(run, step=step)
    DAMAGES[request.param](run / "step_000002" / MANIFEST_NAME)
    return run


def test_a_damaged_step_costs_itself_alone(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command and in Python the others are used, and it is named;
    by itself it is bad input.
    """
    for command in ("merge", "report", "check"):
        assert main([command, str(damaged)]) == 1, command
        printed = capsys.readouterr()
        assert "step_000002" in printed.err + printed.out, command
        assert "Traceback" not in printed.err
    made = [(step / "timeline.json.gz").exists() for step in sorted(damaged.glob("step_*"))]
    assert made == [True, False, True]
    assert main(["diff", str(damaged), str(damaged / "step_000001")]) == 1
    printed = capsys.readouterr()
    assert "2 step(s) before and 1 after" in printed.out
    assert "step_000002" in printed.err
    with pytest.warns(UserWarning, match="step_000002"):
        assert [step.step for step in open_run(damaged).steps()] == [1, 3]
    with pytest.warns(UserWarning, match="step_000002"):
        assert len(load_reports(damaged)) == 2
    (damaged / RUN_NAME).write_text("{}")  # without manifest, its place says that it is a step
    folder = damaged / "step_000002"
    for command in ("merge", "report", "view"):
        assert main([command, str(folder)]) == 2, command
        printed = capsys.readouterr()
        assert "step_000002" in printed.err
        assert printed.err.count("\n") == 1, printed.err
    assert main(["check", str(folder)]) == 1


@pytest.mark.parametrize("damage", ["no UTF-8", "torn", "a list", "nested", "a folder", "a pipe"])
def test_a_run_file_that_cannot_be_read_costs_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    build_step(tmp_path, step=1)
    (tmp_path / RUN_NAME).write_text('{"run_id": "run"}')
    DAMAGES[damage](tmp_path / RUN_NAME)
    assert main(["merge", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["check", str(tmp_path)]) == 1
    assert "unreadable  run.json" in capsys.readouterr().out
    with pytest.raises(TraceFormatError, match=r"run\.json"):
        open_run(tmp_path).info()


def test_collect_goes_on_behind_a_bad_manifest_and_a_torn_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole ranges are fetched, and both are named with exit code 1."""
    lines = []
    for number in (1, 2):
        folder = tmp_path / f"step_{number:06d}"
        folder.mkdir(parents=True)
        noted = NsysRange(
            number=number, folder=folder.name, artifact="a.nsys-rep", begin_ns=1, end_ns=2
        )
        lines.append(msgspec.json.encode(noted))
    (tmp_path / "step_000001" / MANIFEST_NAME).write_text("{")
    (tmp_path / "nsys").mkdir()
    (tmp_path / "nsys" / "actor.7.ranges.jsonl").write_bytes(
        b"\n".join(lines) + b'\n{"number": 3, "fol'
    )
    for number in (1, 2):
        (tmp_path / "nsys" / f"actor.7.{number}.nsys-rep").write_text("report")
    assert main(["collect", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "damaged     nsys/actor.7.ranges.jsonl  a line is incomplete" in printed
    assert "damaged     step_000001/a.nsys-rep" in printed
    assert "ok          step_000002/a.nsys-rep" in printed
    assert all((tmp_path / f"step_{number:06d}" / "a.nsys-rep").exists() for number in (1, 2))


VICTIM = "actor_rank0.torch.json.gz"


def statuses(path: Path) -> dict[str, str]:
    return {entry.path: entry.status for entry in check(path).artifacts}


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "truncated"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + path.read_bytes()[40:]), "unreadable"),
        (
            lambda path: path.write_bytes(
                gzip.compress(b'{"baseTimeNanoseconds":1,"traceEvents":[]}')
            ),
            "empty",
        ),
    ],
    ids=["unlinked", "0 bytes", "cut", "no gzip", "no events"],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: object, status: str) -> None:
    """Whatever happened to one file, it is named, and the others stay ok."""
    folder = build_step(tmp_path)
    damage(folder / VICTIM)
    found = statuses(folder)
    assert found.pop(VICTIM) == status
    assert set(found.values()) == {"ok"}
    assert not check(folder).ok


@pytest.mark.parametrize("status", ["empty", "failed"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_what_the_manifest_knows_is_said_with_its_reason(
    tmp_path: Path, status: str, on_disk: bool
) -> None:
    """A window that was never reached left no file: that is `empty` and why, not `missing`."""
    folder = build_step(tmp_path)
    [artifact] = read_manifest(folder).workers[0].artifacts
    reason = "the recording window never began (start=100)"
    known = msgspec.structs.replace(artifact, status=status, reason=reason)
    rewrite_worker(folder, "actor_rank0", artifacts=[known])
    if not on_disk:
        (folder / VICTIM).unlink()
    [entry] = [entry for entry in check(folder).artifacts if entry.path == VICTIM]
    assert (entry.status, entry.reason) == (status, reason)
    assert not check(folder).ok


@pytest.mark.parametrize(("end_ns", "said"), [(None, "missing"), (2, "never finished")])
def test_what_was_promised_until_the_run_ended_was_never_finished(
    end_ns: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the run goes on, its file may still come."""
    folder = build_step(tmp_path)
    (folder / VICTIM).unlink()
    process = ProcessId.current()
    run = RunInfo(run_id="run", begin_ns=1, end_ns=end_ns, process=process, config={}, versions={})
    write_json_atomically(tmp_path / "run.json", run)
    assert main(["check", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert said in shown
    assert ("never finished" in shown) == (end_ns is not None)


@pytest.mark.parametrize(
    "found",
    [
        {"status": "empty", "reason": "no selected stage ran (selected: reward)", "artifacts": []},
        {"status": "failed", "reason": "the actor died"},
    ],
)
def test_a_worker_that_is_not_well_is_named(tmp_path: Path, found: dict[str, Any]) -> None:
    """Without an artifact, or beside those that it wrote before it died."""
    folder = build_step(tmp_path)
    rewrite_worker(folder, "actor_rank0", **found)
    result = check(folder)
    assert [(e.path, e.status, e.reason) for e in result.artifacts if e.status != "ok"] == [
        ("actor_rank0", found["status"], found["reason"])
    ]
    assert not result.ok


def test_a_request_of_a_stage_that_never_ran_is_not_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each worker may skip it, as another one may run the stage; but none did."""
    folder = build_step(tmp_path)
    reason = "no selected stage ran (selected: nosuch; ran: update_actor)"
    for worker in read_manifest(folder).workers:
        rewrite_worker(folder, worker.name, status="skipped", reason=reason, artifacts=[])
    assert main(["check", str(folder)]) == 1
    assert re.search(rf"^empty +manifest.json +{re.escape(reason)}$", capsys.readouterr().out, re.M)
    assert main(["report", str(folder)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"No trace is there: nothing was recorded: {reason}." in shown
    assert "Nothing stands out" not in shown


def test_a_step_that_recorded_nobody_is_a_finding(tmp_path: Path) -> None:
    """The manifest's notes say why, and so does the check."""
    folder = build_step(tmp_path)
    rewrite(folder, workers=[], notes=["nobody was added"])
    result = check(folder)
    assert (result.artifacts[-1].path, result.artifacts[-1].status) == ("manifest.json", "empty")
    assert result.artifacts[-1].reason == "no worker was captured; nobody was added"
    assert not result.ok


@pytest.mark.parametrize("harm", [Path.mkdir, lambda path: path.symlink_to(path.name), os.mkfifo])
def test_a_watch_log_that_cannot_be_read_costs_its_own_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Damage
) -> None:
    """A folder, links in a circle, or a pipe: each command goes on, and names the log."""
    step = build_step(tmp_path / "run")
    harm(step.parent / "watch.jsonl")
    for command in (
        ["check"],
        ["report"],
        ["report", "--save"],
        ["merge"],
        ["what-if"],
        ["diff", step],
    ):
        code = main([command[0], str(step.parent), *map(str, command[1:])])
        printed = "".join(capsys.readouterr())
        assert code in (0, 1), command
        assert command[0] not in ("check", "report") or "watch.jsonl" in printed, command
        assert "Traceback" not in printed


GROWTH = """
    import os, re, sys
    from pathlib import Path
    from verl_profiling.cli import main

    sys.stdout = open(os.devnull, "w")
    for folder in sys.argv[1:]:
        for command in ("check", "report", "what-if"):
            assert main([command, folder]) in (0, 1), command
        status = Path("/proc/self/status").read_text()
        print(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1], file=sys.stderr)
"""


def blocking(parts: list[Part], begin_ns: int) -> tuple[list[Part], list[Block]]:
    """Return spans of these names one after the other, each with a block behind it."""
    begins = range(begin_ns, begin_ns + 10_000 * len(parts), 10_000)
    spans = [(name, at, at + 3_333) for at, (name, *_) in zip(begins, parts, strict=True)]
    blocks = [Block(0, end, end + 3_333, number, "t", "") for number, (*_, end) in enumerate(spans)]
    return spans, blocks


def log_of(
    parts: list[Part],
    parents: Iterable[int],
    begin_ns: int,
    end_ns: int,
    blocks: Sequence[Block] = (),
) -> TrajectoryLog:
    """Return the log of one trajectory with these spans."""
    return TrajectoryLog(
        lane="agent_loop_rank0",
        begin_ns=begin_ns,
        end_ns=end_ns,
        loops=[LoopRecord(0, 7, "loop")],
        trajectories=[TrajectoryRecord(0, "g", 0, begin_ns, end_ns, "done", 0, "", {})],
        spans=[
            SpanRecord(at, 0, parent, *part, 7, 0, False, "", {})
            for at, (parent, part) in enumerate(zip(parents, parts, strict=True))
        ],
        blocks=[*blocks],
    )


@pytest.mark.parametrize(
    "kind", ["spans in a chain", "spans that block", "stages of the loop", "stages of a worker"]
)
def test_what_is_nested_takes_memory_for_itself_alone(
    tmp_path: Path, run_python: RunPython, kind: str
) -> None:
    """At most ten bytes for each unpacked byte, however deep,
    with names and times drawn by chance.
    """
    plain, step = build_step(tmp_path / "plain"), build_step(tmp_path / "run")
    chance = random.Random(kind)
    count, names = chance.randrange(15_000, 20_000), chance.choice((1, 5, 20_000))
    begin_ns = read_manifest(step).begin_ns
    end_ns = begin_ns + chance.randrange(10**7, 10**9)
    parts = [(f"tool:{chance.randrange(names)}", begin_ns + at, end_ns - at) for at in range(count)]
    stages = [StageSpan(*part, depth=min(at, 1000)) for at, part in enumerate(parts)]
    if kind == "stages of the loop":
        rewrite(step, stages=stages)
    elif kind == "stages of a worker":
        rewrite_worker(step, "actor_rank0", stages=stages)
    elif kind == "spans that block":
        parts, blocks = blocking(parts, begin_ns)
        add_log(step, log_of(parts, [-1] * count, begin_ns, blocks[-1].end_ns, blocks))
    else:
        add_log(step, log_of(parts, range(-1, count - 1), begin_ns, end_ns))
    before, after = map(int, run_python(GROWTH, plain, step).stderr.splitlines()[-2:])
    files = [path for path in step.iterdir() if path.is_file()]
    unpacked = sum(
        len(gzip.decompress(path.read_bytes())) for path in files if path.suffix == ".gz"
    )
    unpacked += sum(path.stat().st_size for path in files if path.suffix != ".gz")
    assert 1024 * (after - before) <= 10 * unpacked
