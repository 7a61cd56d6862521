"""How many operations stages achieve, and which share of a device's peak that is."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import Worker, drawn_inputs, ns
from msgspec.structs import replace

from verl_profiling.analysis import open_step
from verl_profiling.errors import ConfigError
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import MANIFEST_NAME, RunInfo, StageSpan, Work
from verl_profiling.numbers.achieved import ModelShape, shape_of
from verl_profiling.report.model import Report
from verl_profiling.report.summary_text import figures, sentences
from verl_profiling.settings.config import ProfilingConfig

H100 = Path(__file__).parents[1] / "data" / "h100"
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN = {**TINY, "model_type": "qwen2", "dtype": "bfloat16"}
EXPERTS = {**TINY, **MOE, "model_type": "qwen3_moe", "dtype": "bfloat16"}
# As Hugging Face has it: Qwen/Qwen3-30B-A3B, 30.5 billion weights, of which a token uses 3.3.
A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 24}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
        ("Qwen3Moe", {**MOE, "mlp_only_layers": [0]}),
        ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ],
)
def test_the_operations_are_those_that_torch_counts(kind: str, more: dict[str, Any]) -> None:
    """Exactly, but for attention: torch counts products that the causal mask hides."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = getattr(transformers, f"{kind}Config")(**TINY, **more)
    # torch counts neither grouped products of experts nor the fused attention of CPUs
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **eager)
    sequences, length = 2, 11
    ids = torch.randint(0, 100, (sequences, length))
    shape = shape_of(config.to_dict())
    assert isinstance(shape, ModelShape)
    tokens, causal = sequences * length, sequences * length * (length + 1) / 2
    hidden = 4 * shape.attention * (sequences * length**2 - causal)
    ours = shape.forward(tokens, causal, tokens)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
    assert counter.get_total_flops() == ours + hidden
    with counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * (ours + hidden)  # it counts anew: the backward pass


def test_published_formulas_count_more_than_the_work() -> None:
    """Of a mixture of experts 10 times with all experts; on padding 1.65 times, of two lengths."""
    shape = shape_of(A3B)
    assert isinstance(shape, ModelShape)
    everything = shape.weights + (shape.experts - shape.active) * shape.expert
    assert everything / 1e9 == pytest.approx(29.9, abs=0.1)
    assert (shape.weights + shape.head) / 1e9 == pytest.approx(3.04, abs=0.01)
    assert everything / shape.weights == pytest.approx(11.0, abs=0.1)
    assert shape.forward(100, 0, 100) < 0.11 * 2 * (everything + shape.head) * 100
    lengths = [1000, 4000]
    ours = shape.forward(5000, sum(n * (n + 1) / 2 for n in lengths), 5000)
    padded = shape.forward(8000, 2 * 4000 * 4001 / 2, 8000)
    assert padded / ours == pytest.approx(1.65, abs=0.01)


def limit_of(
    folder: Path, model: dict[str, Any] | None, work: Work, device: str = "NVIDIA H200", **more: Any
) -> Report:
    """Return the report of a rank that trains for 2 s and an engine that decodes for 1 s."""
    folder = folder / "step_000001"
    folder.mkdir(exist_ok=True)
    name = "execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk4000sqsq4sqsk4000)"
    prompts = "execute_9_context_1(sq8sk8sqsq64sqsk64)_generation_1(sq1sk100sqsq1sqsk100)"
    trained = Worker("actor", stages=[("update_actor", 2, 4)], kernels=[("gemm", 2, 4)])
    served = Worker(
        "rollout",
        replica=0,
        kernels=[("attention", 0, 2)],
        iterations=[(prompts, 0, 0.1), (name, 1, 1.1), (name, 1.5, 1.6)],
        recorded=(0, 2),
    )
    drawn_inputs(folder, [("rollout", 0, 2), ("update_actor", 2, 4)], [trained, served], 4)
    for trace in folder.glob("*.gz"):
        content = json.loads(gzip.decompress(trace.read_bytes()))
        content = {"deviceProperties": [{"name": device}], **content}
        trace.write_bytes(gzip.compress(json.dumps(content).encode()))
    manifest = read_manifest(folder)
    actor, engine = manifest.workers
    identity = replace(actor.identity, sizes=more.pop("sizes", {}))
    stages = [replace(stage, work=work) for stage in actor.stages]
    actor = replace(actor, stages=stages, identity=identity)
    write_json_atomically(folder / MANIFEST_NAME, replace(manifest, workers=[actor, engine]))
    write_run(folder.parent, {"model": model, **more})
    return open_step(folder).report()


def write_run(folder: Path, settings: dict[str, Any]) -> None:
    info = RunInfo(
        run_id="r", begin_ns=0, process=ProcessId.current(), config=settings, versions={}
    )
    write_json_atomically(folder / "run.json", info)


WORK = Work(samples=2, tokens=6_000_000, tokens_squared=20_000_000_000)


def test_training_and_decoding_are_compared_with_the_peak_of_the_device(tmp_path: Path) -> None:
    """Operations by hand; prefill and decode from the names of the engine's iterations."""
    report = limit_of(tmp_path, EXPERTS, WORK)
    rows = {row.stage: row for row in report.achieved if row.lane != "rollout0_rank0"}
    # by layer and token: q, k, v, o 64x64 + 2x64x32 + 64x64, router 64x6, 2 experts 3x64x32
    token = 3 * (4096 + 4096 + 4096 + 384 + 2 * 6144) + 6400
    pairs = (WORK.tokens_squared + WORK.tokens) / 2
    operations = 3 * (2 * token * WORK.tokens + 4 * 3 * 4 * 16 * pairs)
    assert rows["update_actor"].operations == operations
    assert rows["update_actor"].compute_share == pytest.approx(operations / 2 / 989e12)
    assert rows["(step)"].compute_share == pytest.approx(operations / 4 / 989e12)
    prefill, decode, _ = (row for row in report.achieved if row.lane == "rollout0_rank0")
    assert (prefill.stage, decode.stage) == ("prefill", "decode")
    assert prefill.operations == 2 * (token - 6400) * 9 + 2 * 6400 + 4 * 192 * (36 + 100)
    # of 6 experts, 4 tokens use 6 x (1 - (2/3)^4) on average; a token's keys and values are 192
    weights = 3 * (4096 + 4096 + 4096 + 384 + 6144 * 6 * (1 - (2 / 3) ** 4)) + 6400
    assert decode.gigabytes == pytest.approx(2 * 2 * (weights + 192 * 4000) / 1e9, rel=1e-3)
    assert decode.memory_share == pytest.approx(decode.gigabytes / 4800, rel=1e-3)
    [figure] = [figure for figure in figures(report) if figure.title == "Of the peak"]
    assert "update_actor 1." in figure.line
    assert "decode 0.0% of the memory bandwidth (NVIDIA H200, bfloat16)" in figure.line


def test_ranks_that_share_a_batch_share_its_work(tmp_path: Path) -> None:
    """Tensor, pipeline and context parallel ranks do; data parallel ranks have batches."""
    whole = limit_of(tmp_path, QWEN, WORK).achieved[0].operations
    sizes = {"tp": 2, "cp": 2, "dp": 8}
    assert limit_of(tmp_path, QWEN, WORK, sizes=sizes).achieved[0].operations == whole / 4


@pytest.mark.parametrize(
    ("stages", "known", "counted"),
    [
        # a stage in another one is a part of it
        ([("update_actor", 2, 4), ("update_policy", 2, 4, 1)], [0, 1], {"update_actor": 1}),
        ([("update_actor", 2, 4), ("update_policy", 2, 4, 1)], [1], {"update_actor": 1}),
        # of one of two runs, nothing is known
        ([("update_actor", 2, 3), ("update_actor", 3, 4)], [0], {}),
        # a forward pass inside is no work of the backward pass
        ([("update_actor", 2, 4), ("old_log_prob", 2, 3, 1)], [1], {"old_log_prob": 1 / 3}),
    ],
)
def test_work_counts_once_and_only_if_all_runs_have_it(
    tmp_path: Path, stages: list[Any], known: list[int], counted: dict[str, float]
) -> None:
    """The step has the sum of the stages."""
    whole = limit_of(tmp_path, QWEN, WORK).achieved[0].operations
    folder = tmp_path / "step_000002"
    folder.mkdir()
    drawn_inputs(folder, [("update_actor", 2, 4)], [Worker("actor", stages=stages)], 4)
    manifest = read_manifest(folder)
    [actor] = manifest.workers
    spans = list(actor.stages)
    for number in known:
        spans[number] = replace(spans[number], work=WORK)
    workers = [replace(actor, stages=spans)]
    write_json_atomically(folder / MANIFEST_NAME, replace(manifest, workers=workers))
    shares = {row.stage: row.operations / whole for row in open_step(folder).report().achieved}
    assert shares.pop("(step)", 0.0) == pytest.approx(sum(counted.values()))
    assert shares == pytest.approx(counted)


def test_ranks_of_an_engine_that_are_not_recorded_do_their_part(tmp_path: Path) -> None:
    """One trace of four ranks has a quarter of the work."""
    before = limit_of(tmp_path, EXPERTS, WORK)
    folder = tmp_path / "step_000001"
    manifest = read_manifest(folder)
    actor, engine = manifest.workers
    engine = replace(engine, identity=replace(engine.identity, world_size=4))
    write_json_atomically(folder / MANIFEST_NAME, replace(manifest, workers=[actor, engine]))
    for past, now in zip(before.achieved, open_step(folder).report().achieved, strict=True):
        of_engine = past.lane == "rollout0_rank0"
        assert now.operations == pytest.approx(past.operations / (4 if of_engine else 1))


def with_engine(folder: Path, **facts: Any) -> Report:
    """Return the report of the step, in which the engine's result has other facts."""
    manifest = read_manifest(folder)
    actor, engine = manifest.workers
    engine = replace(engine, **facts)
    write_json_atomically(folder / MANIFEST_NAME, replace(manifest, workers=[actor, engine]))
    return open_step(folder).report()


def test_data_parallel_ranks_of_an_engine_have_work_of_their_own(tmp_path: Path) -> None:
    """Of four ranks, two groups of two: each rank does half of its group's iterations."""
    before = limit_of(tmp_path, EXPERTS, WORK)
    folder = tmp_path / "step_000001"
    identity = read_manifest(folder).workers[1].identity
    after = with_engine(folder, identity=replace(identity, world_size=4, sizes={"dp": 2}))
    for past, now in zip(before.achieved, after.achieved, strict=True):
        of_engine = past.lane == "rollout0_rank0"
        assert now.operations == pytest.approx(past.operations / (2 if of_engine else 1))


@pytest.mark.parametrize(("loaded", "factor"), [(4.0, 2.0), (2.0, 1.0), (0.0, None)])
def test_the_memory_bandwidth_is_of_what_the_engine_loaded(
    tmp_path: Path, loaded: float, factor: float | None
) -> None:
    """The model's configuration says bfloat16, and the engine may have loaded another type."""
    before = limit_of(tmp_path, EXPERTS, WORK)
    after = with_engine(tmp_path / "step_000001", metrics={"bytes_per_weight": loaded})
    [[past], [now]] = [
        [row.memory_share for row in report.achieved if row.stage == "decode"]
        for report in (before, after)
    ]
    assert now == (None if factor is None else pytest.approx(factor * past, rel=1e-3))


def test_a_weight_update_is_no_time_of_decoding(tmp_path: Path) -> None:
    """The engine loads weights for a second after its last iteration."""
    write_run(tmp_path, {"model": QWEN})
    name = "execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk4000sqsq4sqsk4000)"
    served = Worker(
        "rollout",
        replica=0,
        kernels=[("attention", 0, 1), ("copy", 2, 3)],
        iterations=[(name, 0, 1)],
    )
    folder = tmp_path / "step_000001"
    folder.mkdir()
    drawn_inputs(folder, [("rollout", 0, 2), ("update_weights", 2, 3)], [served], 4)
    [decode, _] = open_step(folder).report().achieved
    assert (decode.stage, decode.duration_us) == ("decode", pytest.approx(1e6))


def test_validation_after_the_step_is_no_decoding_of_it(tmp_path: Path) -> None:
    """A capture may last until its end."""
    write_run(tmp_path, {"model": QWEN})
    name = "execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk4000sqsq4sqsk4000)"
    iterations, kernels = [(name, 0, 1), (name, 5, 6)], [("attention", 0, 1), ("attention", 5, 6)]
    served = Worker("rollout", replica=0, kernels=kernels, iterations=iterations)
    folder = tmp_path / "step_000001"
    folder.mkdir()
    manifest = drawn_inputs(folder, [("rollout", 0, 2)], [served], 4).manifest
    around = [StageSpan("validate", ns(4.5), ns(7))]
    write_json_atomically(folder / MANIFEST_NAME, replace(manifest, around_the_step=around))
    [decode, _] = open_step(folder).report().achieved
    assert decode.duration_us == pytest.approx(1e6)


def test_a_lane_of_unknown_work_makes_the_share_a_lower_bound(tmp_path: Path) -> None:
    """A reward model on another device computes, too."""
    write_run(tmp_path, {"model": QWEN})
    folder = tmp_path / "step_000001"
    folder.mkdir()
    actor = Worker("actor", stages=[("update_actor", 2, 4)], kernels=[("gemm", 2, 4)])
    reward = Worker("reward", stages=[("score", 0, 2)], kernels=[("gemm", 0, 2)])
    stages = [("reward", 0, 2), ("update_actor", 2, 4)]
    for workers, value in (([actor], "0.7%"), ([actor, reward], "at least 0.3%")):
        drawn_inputs(folder, stages, workers, 4)
        for trace in folder.glob("*.gz"):
            content = json.loads(gzip.decompress(trace.read_bytes()))
            content = {"deviceProperties": [{"name": "NVIDIA H200"}], **content}
            trace.write_bytes(gzip.compress(json.dumps(content).encode()))
        manifest = read_manifest(folder)
        first, *others = manifest.workers
        first = replace(first, stages=[replace(first.stages[0], work=WORK)])
        both = replace(manifest, workers=[first, *others])
        write_json_atomically(folder / MANIFEST_NAME, both)
        [figure] = [one for one in figures(open_step(folder).report()) if "peak" in one.title]
        assert figure.value == value


@pytest.mark.parametrize(
    ("model", "work", "said"),
    [
        (None, WORK, 'pass the model to see how far stages are from the limit: "model": '),
        (QWEN, Work(tokens=9), 'pass lengths: with stage("update_actor").given(lengths=lengths)'),
        ({**QWEN, "model_type": "mamba"}, WORK, "models of the type mamba are not counted"),
        ({**QWEN, "use_sliding_window": True, "sliding_window": 9}, WORK, "sliding windows"),
        (
            QWEN,
            replace(WORK, tokens=10**12),
            "actor_rank0 cannot reach 296,268 TFLOP/s and 0 GB/s in update_actor",
        ),
        ({"model_type": "qwen2"}, WORK, "configuration is not complete: KeyError: 'hidden_size'"),
    ],
)
def test_without_a_fact_nothing_is_claimed(
    tmp_path: Path, model: dict[str, Any] | None, work: Work, said: str
) -> None:
    """The sentence has the line of code that passes the fact."""
    report = limit_of(tmp_path, model, work)
    assert not [row for row in report.achieved if row.lane == "actor_rank0"]
    assert said in " ".join(sentences(report))


def test_a_device_of_unknown_peak_has_no_share(tmp_path: Path) -> None:
    """Operations per second are known all the same; quantized weights have no bandwidth."""
    model = {**QWEN, "quantization_config": True}
    report = limit_of(tmp_path, model, WORK, "NVIDIA H200 MIG 1g.18gb")
    assert {row.compute_share for row in report.achieved} == {None}
    assert {row.gigabytes for row in report.achieved} == {None}
    assert all(row.teraflops for row in report.achieved)
    assert "Of the peak" not in [figure.title for figure in figures(report)]


def test_the_update_on_an_h100_has_the_operations_of_a_count_by_hand(tmp_path: Path) -> None:
    """256 sequences with 1,842 tokens; a Qwen2 of 2 layers, with 9 words."""
    step = shutil.copytree(H100 / "vllm/step_000004", tmp_path / "step_000004")
    manifest = read_manifest(step)
    requests = [request for worker in manifest.workers for request in worker.requests]
    lengths = [request.prompt_tokens + request.response_tokens for request in requests]
    assert (len(lengths), sum(lengths)) == (256, 1842)
    work = Work(tokens=1842, tokens_squared=sum(length**2 for length in lengths))
    workers = [
        replace(worker, stages=[replace(stage, work=work) for stage in worker.stages])
        for worker in manifest.workers
    ]
    write_json_atomically(step / MANIFEST_NAME, replace(manifest, workers=workers))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9}
    write_run(tmp_path, {"model": {"model_type": "qwen2", "dtype": "float32", **sizes, **heads}})
    rows = {row.stage: row for row in open_step(step).report().achieved}
    # of a token: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128, the words 64 x 9
    products = 2 * (2 * 4096 + 2 * 2048 + 3 * 8192) + 576
    # 2 layers, 2 heads of 32: scores and sums with itself and each token before it
    attention = 2 * 2 * 2 * 32 * sum(sum(range(1, length + 1)) for length in lengths)
    by_hand = 3 * 2 * (1842 * products + attention)
    assert rows["update_actor"].operations == pytest.approx(by_hand, rel=0.02)
    assert rows["update_actor"].teraflops == pytest.approx(by_hand / 0.0622 / 1e12, rel=0.02)
    assert rows["update_actor"].device == "NVIDIA H100 80GB HBM3"
    # the same weights are read in each of 6 iterations; 4 bytes each
    decode = rows["decode"]
    assert decode.gigabytes * decode.duration_us * 1e3 > 6 * 4 * products


def test_the_model_is_a_folder_or_a_mapping(tmp_path: Path) -> None:
    """``run.json`` has its plain values; a missing file is an error of the setting."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "id2label": {"0": "no"}}))
    config = ProfilingConfig(enable=True, model=str(tmp_path), roles={"critic": {"model": QWEN}})
    assert config.to_dict()["model"] == {**QWEN, "id2label": True}
    assert config.to_dict()["roles"]["critic"]["model"] == QWEN
    with pytest.raises(ConfigError, match=r"roles.critic.model: .*nowhere/config.json cannot be"):
        ProfilingConfig(enable=True, roles={"critic": {"model": str(tmp_path / "nowhere")}})
