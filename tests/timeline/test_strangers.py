"""Folders that other tools wrote: whatever their names,
each recording of each process counts once.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from verl_profiling.analysis import open_steps
from verl_profiling.cli import main

BASE_NS = 1_767_225_600_000_000_000
ROLES = ("actor", "critic", "ref", "reward", "rm", "teacher", "value", "policy")
NOISE = (
    "run_lora_rank32",
    "exp.moe-lora-rank-8",
    "localhost_http_8000",
    "footstep9",
    "v2_pretp4",
    "rerank7",
)
OTHERS = {
    "metrics.json": '{"loss": NaN}\n{"loss": 2}\n',
    "config.json": '{"lr": [1, 2]}',
    "trainer_state.json": '{"best": NaN, "epochs": Infinity}',
}
EXECUTION_TRACE = '{"schema": "1.1.1-chakra.0.0.4", "nodes": ["' + "x" * (65 << 20) + '"]}'


def recording(draw: random.Random, pid: int, title: str = "python", **head: Any) -> dict[str, Any]:
    """Return a trace of a process with some kernels."""
    count, at = draw.randint(3, 12), round(draw.uniform(0, 900), 3)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": pid,
            "tid": pid,
            "ts": at,
            "dur": 9_000,
        },
    ]
    for number in range(count):
        span = {"ts": at + 700 * number + 1, "dur": round(draw.uniform(1, 600), 3)}
        events.append({"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, **span})
    return {"baseTimeNanoseconds": BASE_NS} | head | {"traceEvents": events}


def write(path: Path, trace: dict[str, Any] | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = trace if isinstance(trace, str) else json.dumps(trace)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def trainers(draw: random.Random, names: dict[str, dict[str, Any]]) -> list[str]:
    """Draw the ranks of some roles, named as a tool or a person names them."""
    expected = []
    for role in draw.sample(ROLES, draw.randint(1, 3)):
        outer = "/".join(
            draw.sample(NOISE, draw.randint(0, 2)) + draw.sample(ROLES, draw.randint(0, 1))
        )
        ranks = range(draw.randint(1, 3)) if draw.random() < 0.5 else draw.sample(range(64), 3)
        for style in [draw.randrange(6)]:
            for rank in ranks:
                pid, serial = draw.randint(100, 10**6), draw.randrange(10**9)
                file = (
                    f"{role}/prof_rank-{rank}_{pid}_2026{serial}.json.gz",
                    f"e2e/{role}_e2e_rank{rank}-of-64_tp{rank % 2}-pp1-dp0-cp0_pid{pid}"
                    f"_2026{serial}.json.gz",
                    f"{role}/primus-exp[a]-rank[{rank}].{serial}.pt.trace.json",
                    f"rank{rank + 1}/{role}_tp{draw.randrange(8)}_rank_{rank}.json",
                    f"{role}/global_rank{rank}_tp_rank{draw.randrange(8)}_lora_rank16.json",
                    f"{role}/trace_TP-{rank}-PP-3.json",
                )[style]
                names[f"{outer}/{file}".lstrip("/")] = recording(draw, pid, host_name="node0")
                expected.append(f"{role}_rank{rank}")
    return expected


def engines(draw: random.Random, names: dict[str, dict[str, Any]]) -> list[str]:
    """Draw data-parallel engines that write into one folder,
    as vLLM or SGLang names their ranks.
    """
    replicas, size, style = draw.randint(1, 4), draw.randint(1, 3), draw.randrange(3)
    front = {"node0_9.async_llm.1767225600.pt.trace.json": recording(draw, 9, "VLLM::APIServer")}
    names |= front if style == 0 else {}
    for replica in range(replicas):
        for rank in range(size):
            pid, serial = 1000 + 100 * replica + rank, 17672256 * 10**6 + 1000 * replica + rank
            file = (
                f"dp{replica}_pp0_tp{rank}_dcp0_ep0_rank{rank}.{serial}.pt.trace.json.gz",
                f"1767225600.1-TP-{rank}-DP-{replica}.trace.json.gz",
                f"rollout_{replica}/rank{rank}.{serial}.pt.trace.json",
            )[style]
            names[file] = recording(
                draw, pid, "sglang::scheduler" if style == 1 else "VLLM::Worker"
            )
    lanes = [f"rollout{replica}_rank{rank}" for replica in range(replicas) for rank in range(size)]
    return lanes + (["rollout0_rank0.2"] if style == 0 else [])


def pods(draw: random.Random, names: dict[str, dict[str, Any]]) -> list[str]:
    """Draw processes without ranks: pods with one process id and no host, or a file per process."""
    count, is_numbered = draw.randint(2, 4), draw.random() < 0.5
    pid, folders = draw.randint(1, 99), draw.random() < 0.5
    for number in range(count):
        if is_numbered:
            names[f"profile_{number}.json"] = recording(draw, 5000 + number)
        else:
            joint = "/" if folders else "_"
            name = f"pod-{'xyzw'[number]}{joint}{pid}.{draw.randrange(10**9)}.pt.trace.json"
            names[name] = recording(draw, pid)
    again = [f"worker_rank0.{number}" for number in range(2, count + 1)]
    return (
        [f"worker_rank{number}" for number in range(count)]
        if is_numbered
        else ["worker_rank0", *again]
    )


def copies(draw: random.Random, names: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draw files that repeat a recording: compressed, elsewhere, formatted, or merged by SGLang."""
    repeated: dict[str, Any] = {}
    for name in draw.sample(sorted(names), draw.randint(0, min(3, len(names)))):
        other = name.removesuffix(".gz") if name.endswith(".gz") else f"{name}.gz"
        text = json.dumps(names[name], indent=draw.choice([None, 1]))
        repeated[
            draw.choice([other, f"backup/{name}", f"{name.removesuffix('.gz')}.copy.json"])
        ] = text
    ranks = sorted(name for name in names if "-TP-" in name and "-DP-" in name)
    if ranks:
        events = [
            {**event, "pid": f"[TP0{name.split('-TP-')[1][0]}] {event['pid']}"}
            for name in ranks
            for event in names[name]["traceEvents"]
        ]
        repeated["merged-1767225600.1.trace.json.gz"] = {**names[ranks[0]], "traceEvents": events}
    return repeated


@pytest.mark.parametrize("seed", range(40))
def test_each_process_is_one_lane_and_each_recording_counts_once(seed: int, tmp_path: Path) -> None:
    """Ranks, roles and replicas are those of the names; copies are said;
    other JSON is no damage.
    """
    draw = random.Random(seed)
    names: dict[str, dict[str, Any]] = {}
    expected = (trainers, engines, pods)[seed % 3](draw, names)
    kernels = sum(
        event.get("cat") == "kernel" for trace in names.values() for event in trace["traceEvents"]
    )
    repeated = copies(draw, names)
    others = {name: OTHERS[name] for name in draw.sample(sorted(OTHERS), draw.randint(0, 3))}
    others |= {"chakra/rank-0.json": EXECUTION_TRACE} if seed % 20 == 0 else {}
    for name, content in (names | repeated | others).items():
        write(tmp_path / name, content)
    [step], damaged = open_steps([tmp_path])
    report = step.report()
    assert not damaged
    assert sorted(row.name for row in report.workers) == sorted(expected)
    assert sum(row.calls for row in report.kernels) == kernels
    assert sum("holds the same recording as" in note for note in report.notes) == len(repeated)
    assert main(["check", str(tmp_path)]) == 0


def test_empty_traces_repeat_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing shows that two traces of one process number without events are the same recording."""
    for name in ("run/a/rank0.json", "run/b/rank0.json"):
        write(tmp_path / name, {**recording(random.Random(1), 42), "traceEvents": []})
    assert main(["report", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "holds no events" in said
    assert "same recording" not in said


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_begin_apart_are_said(seed: int, tmp_path: Path) -> None:
    """More than a second between the first recordings of two hosts of a role is a note;
    less is none.
    """
    draw = random.Random(seed)
    apart_s = draw.choice([0.02, 0.4, 1.5, 5, 60])
    for rank in range(4):
        late_ns = round(apart_s * 1e9) * (rank > 1) + draw.randint(0, 10**7)
        trace = recording(
            draw, 100 + rank, host_name=f"node{rank // 2}", baseTimeNanoseconds=BASE_NS + late_ns
        )
        write(tmp_path / f"actor_rank{rank}.json", trace)
    [step], _ = open_steps([tmp_path])
    said = [note for note in step.report().notes if "actor: recordings of node1 begin" in note]
    assert len(said) == (apart_s > 1)
