"""Engine iterations are known by the names that vLLM and SGLang give them,
in each version and mode.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from verl_profiling.analysis import open_steps
from verl_profiling.report.model import Report

MI300 = Path(__file__).parents[1] / "data" / "mi300"
MODES = (
    "MIXED",
    "TARGET_VERIFY",
    "DRAFT_EXTEND",
    "DRAFT_EXTEND_V2",
    "SPLIT_PREFILL",
    "DLLM_EXTEND",
)
STRANGE = ("step[DRAFT_LOOP raw_bs=2 bs=4 topk=1]", "execute_batch7", "step[warmup]")
Tokens = tuple[int, int] | None


def drawn(draw: random.Random, family: str) -> tuple[str, Tokens]:
    """Draw the name of an iteration, with its prompt and new tokens;
    ``None`` where no name says them.
    """
    context, new, prompt = draw.randint(0, 4), draw.randint(1, 64), draw.randint(1, 9_000)
    prompt *= context > 0
    sums = f"sqsq{draw.randint(0, 10**6)}sqsk{draw.randint(0, 10**6)}"
    if family == "vllm":
        return f"execute_context_{context}({prompt})_generation_{new}({new})", (prompt, new)
    if family == "vllm, detailed":
        parts = f"context_{context}(sq{prompt}sk{prompt}{sums})"
        parts += f"_generation_{new}(sq{new}sk{new * 90}{sums})"
        return f"execute_{prompt + new}_{parts}", (prompt, new)
    if family == "vllm, squares":
        return f"execute_context_{context}({prompt}_{prompt**2})_generation_{new}({new}_{new})", (
            prompt,
            new,
        )
    if family == "vllm, requests":
        return f"execute_new_{context}_cached_{new}", None
    if family == "sglang":
        name, tokens = draw.choice(
            [
                (f"EXTEND bs={new} toks={prompt + 1}", (prompt + 1, 0)),
                (f"DECODE bs={new}", (0, new)),
            ]
        )
        return f"step[{name}{draw.choice(['', ' g_sqsq=9 g_sqsk=9 g_sk=9'])}]", tokens
    if family == "sglang, sums":
        sums = f"c_sq={prompt} c_sk=9 c_sqsq=9 c_sqsk=9 g_sq={new} g_sk=9 g_sqsq=9 g_sqsk=9"
        return f"step[MIXED bs={context + new} c={context} g={new} {sums}]", (prompt, new)
    return f"step[{draw.choice(MODES)} bs={new}]", None


FAMILIES = (
    "vllm",
    "vllm, detailed",
    "vllm, squares",
    "vllm, requests",
    "sglang",
    "sglang, sums",
    "sglang, modes",
)


def report_of(path: Path) -> Report:
    [step], _ = open_steps([path])
    return step.report()


@pytest.mark.parametrize("seed", range(28))
def test_each_iteration_counts_once_with_its_tokens(seed: int, tmp_path: Path) -> None:
    """Nothing to do is no iteration, an inner annotation is the outer's,
    and unknown tokens are unknown.
    """
    draw = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    names = [drawn(draw, family) for _ in range(draw.randint(1, 30))]
    strange = draw.sample(STRANGE, draw.randint(0, 2))
    nothing = "execute_context_0(0)_generation_0(0)" if family[0] == "v" else "step[IDLE bs=0]"
    marks = [name for name, _ in names] + strange + [nothing] * draw.randint(0, 2)
    draw.shuffle(marks)
    events = [
        {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "VLLM::Worker"}}
    ]
    for number, name in enumerate(marks):
        span = {"ph": "X", "cat": "user_annotation", "pid": 9, "tid": 9, "name": name}
        events.append({**span, "ts": 1000 * number, "dur": 900})
        if draw.random() < 0.2 and name not in strange:
            events.append({**span, "ts": 1000 * number + 5, "dur": 890})
        events.append(
            {**span, "cat": "cpu_op", "name": "aten::mm", "ts": 1000 * number + 10, "dur": 500}
        )
    (tmp_path / "rank0.json").write_text(
        json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": events})
    )
    report = report_of(tmp_path)
    [engine] = report.engines
    known = [tokens for _, tokens in names if tokens is not None]
    assert engine.iterations == len(names)
    if len(known) == len(names):
        prompt, new = (sum(column) for column in zip(*known, strict=True))
        assert (engine.prefill_tokens, engine.decode_tokens) == (prompt, new)
    else:
        assert engine.decode_tokens is None
        assert report.throughput is None
    said = " ".join(note for note in report.notes if "not understood" in note)
    assert all((name[:40] in said) == (name in strange) for name in STRANGE)


@pytest.mark.parametrize(
    ("name", "tokens", "busy_us"),
    [
        ("vllm_decode_full", (0, 32), 10_718),
        ("vllm_prefilldecode_piecewise", (8_155, 37), 156_086),
        ("sglang_decode", (0, 32), 9_773),
    ],
)
def test_a_real_engine_has_one_iteration(name: str, tokens: tuple[int, int], busy_us: int) -> None:
    """Traces of vLLM and SGLang on MI300, with the busy time
    of a sweep over their device events.
    """
    report = report_of(MI300 / f"{name}.json.gz")
    [engine] = report.engines
    assert (engine.iterations, (engine.prefill_tokens, engine.decode_tokens)) == (1, tokens)
    assert round(report.workers[0].busy_us) == busy_us


def test_the_capture_of_graphs_is_no_idle_time(tmp_path: Path) -> None:
    """A trace of SGLang capturing graphs, alone and beside the engine's,
    adds neither work nor loss.
    """
    alone = report_of(MI300 / "sglang_graph_capture_bs_32.json.gz")
    (tmp_path / "capture_traces").mkdir()
    for name in ("sglang_decode.json.gz", "sglang_graph_capture_bs_32.json.gz"):
        folder = "capture_traces" if "capture" in name else "."
        (tmp_path / folder / name).write_bytes((MI300 / name).read_bytes())
    beside = report_of(tmp_path)
    engine = report_of(MI300 / "sglang_decode.json.gz")
    assert (alone.findings, sum(row.seconds for row in alone.lost), alone.span_us) == ([], 0, 0)
    assert any("graphs were captured" in note for note in alone.notes)
    assert (beside.lost, beside.span_us) == (engine.lost, engine.span_us)
    assert [row.name for row in beside.workers if not row.span_us] == ["graph_capture_rank0"]
