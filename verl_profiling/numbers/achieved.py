"""The operations per second that stages achieve, and the memory bandwidth of decoding.

Operations follow from the model's shape, as its Hugging Face configuration has it, and the work
that a stage was given. Time is that of the worker in the stage, with all waits;
of an engine, the time in which its host or device worked from an iteration's begin to the next.

Counted are the products of matrices; each multiplication with its addition is two operations. Other
work (norms, activations, sampling, the optimizer) is below 1% in models of common size.

=========== ============================================================= ======================
part        operations of a forward pass                                  source
=========== ============================================================= ======================
weights     2 for each weight of a product and token; of experts, those   Kaplan et al. 2020,
            that a token uses. An embedding is looked up, not multiplied  table 1 (``C_forward``)
head        2 for each weight of the output layer, also where it is tied  the same
attention   4 x layers x heads x head size for each pair of a token with  Dao 2023 (causal FLOPs
            itself or a token before it                                   of FlashAttention-2)
=========== ============================================================= ======================

A backward pass has twice the operations of the forward pass. What a device computes again, to save
memory, or on padding, is no work of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.engine_iterations import UNKNOWN_TOKENS
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import BYTES_OF, NUMBER_BYTES, WEIGHT_SYNC, CaptureResult
from verl_profiling.numbers.report_columns import AchievedRow, WorkRow
from verl_profiling.slices.intervals import (
    EMPTY,
    Ints,
    covered_before,
    grouped,
    holding,
    length,
    subtract,
    time_of,
    union,
)
from verl_profiling.steps.lanes import Lane, Step

_COUNTED = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Kinds of models (``model_type``) whose formulas are checked against torch's FlopCounterMode."""
TRAINING = 3
"""Operations of a forward and a backward pass, as a multiple of those of the forward pass."""
CRITIC = "critic"
WHOLE_STEP = "(step)"
"""Stage of the row with all operations of a lane, over the duration of the step."""
_OF_CRITIC = ("update_critic", "values")
_SHARED_BY = ("tp", "pp", "cp", "sp")
"""Parallel dimensions whose ranks get the same batch, and share its work."""
_PASS_MODEL = {
    CRITIC: 'pass the critic\'s model: "roles": {"critic": {"model": critic.config.to_dict()}}',
    "": 'pass the model to see how far stages are from the limit: "model": model.config.to_dict()',
}


class Peak(NamedTuple):
    """The peak of a device, for dense products of bfloat16; vendors often print the peak for sparse
    matrices, which is twice as high.

    Attributes:
        device: Name of the device, as torch's traces have it. A part of a device (MIG) has another
            name.
        tflops: Operations per second, in units of 10^12.
        bandwidth: Bandwidth of the memory, in units of 10^12 bytes per second.
        source: Origin of the numbers.
    """

    device: str
    tflops: float
    bandwidth: float
    source: str


_A100, _H100 = "NVIDIA A100 data sheet, June 2021", "NVIDIA H100 data sheet"
_CALLED = (
    "verl, `utils/flops_counter.py`; LLMRoofline, `hardware_dict.py`"  # no data sheet is public
)

PEAKS = (
    Peak("NVIDIA B200", 2250, 8.0, "NVIDIA DGX B200 data sheet, by 8"),
    Peak("NVIDIA H200", 989, 4.8, "NVIDIA H200 data sheet"),
    Peak("NVIDIA H100 80GB HBM3", 989, 3.35, _H100),
    Peak("NVIDIA H100 NVL", 835, 3.9, _H100),
    Peak("NVIDIA H100 PCIe", 756, 2.0, _H100),
    Peak("NVIDIA H800", 989, 3.35, _CALLED),
    Peak("NVIDIA H20", 148, 4.0, _CALLED),
    Peak("NVIDIA A100-SXM4-80GB", 312, 2.039, _A100),
    Peak("NVIDIA A100 80GB PCIe", 312, 1.935, _A100),
    Peak("NVIDIA A100-SXM4-40GB", 312, 1.555, _A100),
    Peak("NVIDIA A100-PCIE-40GB", 312, 1.555, _A100),
    Peak("NVIDIA L40S", 362, 0.864, "NVIDIA L40S data sheet"),
    Peak("AMD Instinct MI300X", 1307, 5.3, "AMD Instinct MI300X data sheet"),
    Peak("AMD Instinct MI325X", 1307, 6.0, "AMD Instinct MI325X data sheet"),
)
"""The peaks of known devices."""

PEAK_OF = {peak.device: peak for peak in PEAKS}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that its work follows from.

    Attributes:
        weights: Weights that a token is multiplied with, without the output layer.
        head: Weights of the output layer.
        attention: Layers times heads times head size.
        kv: Numbers that a token adds to the cache of keys and values.
        expert: Weights of one expert, in all layers with experts.
        experts: Number of experts of a layer; 0 without experts.
        active: Number of experts that a token uses.
        bytes: Bytes of a number; ``None`` for quantized weights, or an unknown type.
    """

    weights: int
    head: int
    attention: int
    kv: int
    expert: int = 0
    experts: int = 0
    active: int = 0
    bytes: int | None = None

    def forward(self, tokens: float, pairs: float, outputs: float) -> float:
        """Return the operations of a forward pass.

        Args:
            tokens: Number of tokens, without padding.
            pairs: Number of pairs of a token with itself or a token before it, in its sequence.
            outputs: Number of tokens that the output layer is applied to.
        """
        return 2 * self.weights * tokens + 2 * self.head * outputs + 4 * self.attention * pairs

    def numbers_read(self, tokens: NDArray[Any], cached: NDArray[Any]) -> NDArray[Any]:
        """Return the weights, keys and values that iterations of decoding have to read.

        Of experts, those count that the tokens are expected to use, if all experts are as likely.

        Args:
            tokens: Number of tokens of each iteration, one for each sequence.
            cached: Sum of the lengths of their sequences.
        """
        unused = (1 - self.active / max(self.experts, 1)) ** tokens
        weights = self.weights - self.active * self.expert + self.head
        read: NDArray[Any] = weights + self.experts * self.expert * (1 - unused) + self.kv * cached
        return read


def shape_of(config: Mapping[str, Any], has_head: bool = True) -> ModelShape | str:
    """Return the shape of a model, or why it is unknown.

    Args:
        config: The Hugging Face configuration, as in ``config.json``.
        has_head: Whether the output layer gives a number for each word; a critic's gives one.
    """
    kind = config.get("model_type")
    if kind not in _COUNTED:
        return f"models of the type {kind} are not counted, only {', '.join(_COUNTED)}"
    if config.get("sliding_window") and config.get("use_sliding_window", kind == "mistral"):
        return "sliding windows of attention are not counted"
    try:
        return _shape(config, has_head)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"the model's configuration is not complete: {type(error).__name__}: {error}"


def _shape(config: Mapping[str, Any], has_head: bool) -> ModelShape:
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    of_attention = 2 * hidden * head_size * (heads + kv_heads)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    sparse = 0
    if experts:
        sparse = sum(_has_experts(layer, config) for layer in range(layers))
    dense = 0
    if sparse < layers:
        dense = 3 * hidden * int(config["intermediate_size"])
    weights = layers * of_attention + (layers - sparse) * dense
    expert = active = 0
    if sparse:
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        expert = sparse * 3 * hidden * int(width)
        active = int(config["num_experts_per_tok"])
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        of_router = hidden * experts
        if shared:
            of_router += hidden * (3 * shared + 1)  # the shared expert, and its gate
        weights += sparse * of_router + active * expert
    quantized = config.get("quantization_config")
    kind = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return ModelShape(
        weights=weights,
        head=hidden * (int(config["vocab_size"]) if has_head else 1),
        attention=layers * heads * head_size,
        kv=2 * layers * kv_heads * head_size,
        expert=expert,
        experts=experts,
        active=active,
        bytes=None if quantized else BYTES_OF.get(kind),
    )


def _has_experts(layer: int, config: Mapping[str, Any]) -> bool:
    """Return whether a layer has experts in place of a dense product, as in Qwen's models."""
    is_dense = layer in (config.get("mlp_only_layers") or ())
    return not is_dense and (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


class Achieved:
    """The rows of a step, and what is unknown of it.

    Args:
        step: The step.
        work: The work given to workers.
        settings: The settings of the run, as in ``run.json``.

    Attributes:
        rows: A row for each lane and stage with known operations, and for the lane's whole step.
        unknown: Sentences on what is missing; empty on CPUs without any row.
    """

    def __init__(self, step: Step, work: Sequence[WorkRow], settings: Mapping[str, Any]) -> None:
        self._step, self._settings = step, settings
        self.rows: list[AchievedRow] = []
        self.unknown: list[str] = []
        workers = {worker.name: worker for worker in step.workers}
        for name, of_worker in grouped(work, attrgetter("worker")).items():
            if name in workers and not workers[name].identity.is_engine:
                self._add_worker(workers[name], {row.stage: row for row in of_worker})
        for lane in step.lanes:
            if lane.is_engine and len(lane.iterations):
                self._add_engine(lane)
        for name, of_lane in grouped(self.rows, attrgetter("lane")).items():
            flops = sum(row.operations for row in of_lane)
            self._add(name, WHOLE_STEP, of_lane[0].device, step.span_ns, flops)
        if not self.rows and not any(lane.on_device for lane in step.lanes):
            self.unknown.clear()

    def _shape(self, role: str) -> ModelShape | None:
        """Return the shape of a role's model. A critic's may be another one than the policy's."""
        of_role = (self._settings.get("roles") or {}).get(role) or {}
        config = of_role.get("model") or (role != CRITIC and self._settings.get("model"))
        shape: ModelShape | str = _PASS_MODEL.get(role, _PASS_MODEL[""])
        if isinstance(config, dict):
            shape = shape_of(config, has_head=role != CRITIC)
        return self._known(shape)

    def _known(self, shape: ModelShape | str) -> ModelShape | None:
        if isinstance(shape, ModelShape):
            return shape
        if shape not in self.unknown:
            self.unknown.append(shape)
        return None

    def _add_worker(self, worker: CaptureResult, work: Mapping[str, WorkRow]) -> None:
        """Add the rows of a training worker, by stage."""
        lanes = self._step.lanes_of(worker.name)
        device = lanes[0].model if len(lanes) == 1 and lanes[0].on_device else ""
        ranks = prod(worker.identity.sizes.get(name, 1) for name in _SHARED_BY)
        outer_first = sorted(worker.stages, key=attrgetter("begin_ns", "depth"))
        counted = EMPTY
        for stage in dict.fromkeys(map(attrgetter("name"), outer_first)):
            passes, time = _passes(stage), time_of(worker.stages, stage)
            if not passes or not length(subtract(time, counted)):
                continue  # without a model, or a part of a stage that counts
            given = _given(worker, stage, work)
            shape = self._shape(CRITIC if stage in _OF_CRITIC else worker.identity.role)
            if given is None or not given.tokens or not given.tokens_squared:
                self._known(f'pass lengths: with stage("{stage}").given(lengths=lengths)')
            elif shape is not None:
                pairs = (given.tokens_squared + given.tokens) / 2
                flops = passes * shape.forward(given.tokens, pairs, given.tokens) / ranks
                self._add(worker.name, stage, device, length(time), flops)
                counted = union(counted, time)

    def _add_engine(self, lane: Lane) -> None:
        """Add the rows of an engine's rank: prefill, and decode."""
        shape = self._shape(ROLLOUT_ROLE)
        is_used = ~holding(self._step.validations, lane.iterations[:, 0])
        iterations = lane.iterations[is_used]
        attention = _attention(iterations, lane, self._step)
        if attention is None:
            self._known("the lengths of sequences in the engine's iterations are unknown")
        if shape is None or attention is None:
            return
        pairs, cached = attention
        worker = self._step.worker_of(lane.source)
        ranks: float = len(self._step.lanes_of(lane.source.worker))
        number_bytes: float | None = shape.bytes
        if worker is not None:
            ranks = max(ranks, worker.identity.world_size)  # not all of them may be recorded
            # An iteration is of one group of ranks, with requests and weights of its own.
            ranks /= worker.identity.sizes.get("dp", 1)
            # The engine may load another type than that of the model's configuration.
            number_bytes = worker.metrics.get(NUMBER_BYTES, number_bytes)
        sync = self._step.during(WEIGHT_SYNC)
        first, stop = np.searchsorted(lane.iterations[:, 0], sync).T
        # A weight update without an iteration is no part of the iteration before it.
        work = union(subtract(lane.busy, sync[first == stop]), lane.iterations[:, :2])
        edges = np.append(lane.iterations[:, 0], max(work[-1, 1], self._step.end_ns))
        took = np.diff(covered_before(work, edges))[is_used]
        tokens, new = iterations[:, 2:5].sum(axis=1), iterations[:, 3]
        is_prefill = iterations[:, 2] > 0
        for stage, chosen in (("prefill", is_prefill), ("decode", ~is_prefill & (tokens > 0))):
            sizes = tokens[chosen]
            # The output layer for the last tokens of prompts is left out: one of many tokens.
            flops = shape.forward(sizes.sum(), pairs[chosen].sum(), new[chosen].sum()) / ranks
            read = None
            if stage == "decode" and number_bytes:
                numbers = float(shape.numbers_read(sizes, cached[chosen]).sum())
                read = numbers * number_bytes / ranks
            if len(sizes):
                device = lane.model if lane.on_device else ""
                self._add(lane.name, stage, device, int(took[chosen].sum()), float(flops), read)

    def _add(
        self,
        lane: str,
        stage: str,
        device: str,
        took_ns: int,
        flops: float,
        read: float | None = None,
    ) -> None:
        """Add a row, unless it has more than the peak of the device."""
        seconds = max(took_ns, 1) / 1e9
        teraflops = flops / seconds / 1e12
        gigabytes = None if read is None else read / seconds / 1e9
        shares: dict[str, float] = {}
        if peak := PEAK_OF.get(device):
            shares["compute_share"] = teraflops / peak.tflops
            if gigabytes is not None:
                shares["memory_share"] = gigabytes / 1000 / peak.bandwidth
        if max(shares.values(), default=0.0) > 1:
            rates = f"{teraflops:,.0f} TFLOP/s and {gigabytes or 0:,.0f} GB/s"
            self._known(f"{lane} cannot reach {rates} in {stage}: lengths or model are wrong")
            return
        row = AchievedRow(
            lane=lane,
            stage=stage,
            device=device,
            duration_us=took_ns / 1000,
            operations=flops,
            teraflops=float(f"{teraflops:.4g}"),
            gigabytes=None if gigabytes is None else float(f"{gigabytes:.4g}"),
            **shares,
        )
        self.rows.append(row)


def _passes(stage: str) -> int:
    """Return the forward passes that a stage is worth: 0 for a stage without a model, or an unknown
    one.
    """
    if stage.startswith("update_") and stage != WEIGHT_SYNC:
        return TRAINING
    return int(stage.endswith("log_prob") or stage in _OF_CRITIC)


def _given(worker: CaptureResult, stage: str, work: Mapping[str, WorkRow]) -> WorkRow | None:
    """Return the work of a stage, else of the stages inside it alone, such as micro-batches.

    It is ``None`` if a run has no known work, or if the stages inside have other passes.
    """
    time = time_of(worker.stages, stage)
    for name in (stage, *work):
        begins = np.array([span.begin_ns for span in worker.stages if span.name == name], np.int64)
        is_known = name in work and work[name].runs == len(begins)
        is_alike = _passes(name) in (0, _passes(stage))
        if is_known and is_alike and holding(time, begins).all():
            return work[name]
    return None


def _attention(
    iterations: Ints, lane: Lane, step: Step
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return the pairs and cached lengths of each iteration; ``None`` if they are unknown.

    Without detailed names of iterations, they are averages over the engine's requests, if these
    have all prompt tokens of the iterations.
    """
    if (iterations[:, 2:5] == UNKNOWN_TOKENS).any():
        return None
    if (iterations[:, 5:] != UNKNOWN_TOKENS).all():
        return iterations[:, 5], iterations[:, 6]
    sizes = np.array(
        [
            (row.prompt_tokens, row.cached_tokens or 0, row.response_tokens)
            for row in step.requests
            if row.replica == lane.source.replica and not row.validate
        ],
        float,
    ).reshape(-1, 3)
    prompt, cached = sizes[:, 0], sizes[:, 1]
    later = np.maximum(sizes[:, 2] - 1, 0)  # the first token comes with the prompt
    prompts = (prompt - cached).sum()
    if not prompts or prompts != iterations[:, 2].sum():
        return None
    pairs = (prompt * (prompt + 1) - cached * (cached + 1)).sum() / 2
    average = (later * prompt + later * (later + 1) / 2).sum() / max(later.sum(), 1)
    of_new = average * iterations[:, 3:5].sum(axis=1)
    return of_new + pairs / prompts * iterations[:, 2], of_new
