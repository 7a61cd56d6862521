"""``diff`` of several runs a side knows how much starts of one configuration differ."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import summary

from verl_profiling.cli import main
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.watch.log_writer import WatchLog

MEMORY_TRACE = Path(__file__).parents[1] / "data" / "h100" / "memory.torch.json.gz"
STARTS_MS = (980, 1010, 1040, 995, 1020)  # of a step, of five starts of one configuration


def runs(
    folder: Path, starts_ms: Iterable[float], version: str = "0.32", slots: int = 64
) -> list[str]:
    """Write watched runs, whose steps vary by 1%; return their folders."""
    noise = random.Random(7)
    folders = []
    for number, step_ms in enumerate(starts_ms):
        run = folder / str(number)
        run.mkdir(parents=True)
        info = RunInfo(
            run_id=str(run),
            begin_ns=0,
            process=ProcessId.current(),
            config={"save_path": str(run), "job": {"engine": {"max_num_seqs": slots}}},
            versions={"vllm": version},
        )
        (run / "run.json").write_bytes(msgspec.json.encode(info))
        log = WatchLog(run)
        for step in range(1, 13):
            log(summary(step, {"rollout": 500, "update_actor": step_ms * noise.gauss(1, 0.01)}))
        folders.append(str(run))
    return folders


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["diff", *arguments, "--fail-above", "2%"])
    return code, " ".join(capsys.readouterr().out.split()).split("All steps")


def test_five_runs_a_side_tell_a_change_from_the_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change of a step beyond all starts fails; one within them says how many runs tell it."""
    before = runs(tmp_path / "a", STARTS_MS)
    slower = runs(tmp_path / "b", [1.1 * step_ms for step_ms in STARTS_MS], "0.33", 128)
    code, (head, *_) = compared(capsys, *before, "--", *slower)
    assert code == 1
    assert head.startswith("vllm 0.32 -> 0.33, engine.max_num_seqs 64 -> 128 slower: step +")
    assert "; 5 and 5 runs, runs differ by ±" in head
    unclear = runs(tmp_path / "c", [1.02 * step_ms for step_ms in STARTS_MS])
    code, (head, tail) = compared(capsys, *before, "--", *unclear)
    assert code == 0
    assert head.startswith("cannot tell: step +")
    assert " more runs a side" in head
    assert "slower by more than 2% and 10.0 ms: nothing (cannot tell: step" in tail


def test_one_run_a_side_is_held_against_starts_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As steps of one run do not show how much the next start differs."""
    (before,) = runs(tmp_path / "a", [1000])
    (slightly,) = runs(tmp_path / "b", [1050])
    (clearly,) = runs(tmp_path / "c", [2500])
    code, (head, _) = compared(capsys, before, slightly)
    assert (code, head[:12]) == (0, "cannot tell:")
    assert "1 and 1 runs, two starts of one configuration differ by up to " in head
    code, (head, _) = compared(capsys, before, clearly)
    assert (code, head[:7]) == (1, "slower:")


@pytest.mark.parametrize(
    "paths", [["a"], ["a", "b", "c"], ["a", "--"], ["a", "--", "b", "--", "c"]]
)
def test_both_sides_have_a_path(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *paths]) == 2
    assert "two paths, or several a side: RUN_A... -- RUN_B..." in capsys.readouterr().err


def test_a_renamed_kernel_is_no_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels are those of the operator that launched them, where their names differ."""
    trace = gzip.decompress(MEMORY_TRACE.read_bytes())
    (tmp_path / "a.json").write_bytes(trace)
    (tmp_path / "b.json").write_bytes(trace.replace(b"sm80_xmma", b"sm90_xmma"))
    main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"])
    changes = json.loads(capsys.readouterr().out)["changes"]
    kernels = {change["name"]: change for change in changes if change["kind"] == "kernel"}
    assert not [name for name in kernels if "xmma" in name]
    assert kernels["kernels of aten::mm"]["change_s"] == 0
