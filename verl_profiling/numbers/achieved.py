"""The operations per second that stages achieve, and the memory bandwidth of decoding.

Operations follow from the model's shape and the work that a stage was given, see
:mod:`~verl_profiling.numbers.model_shape`. Time is that of the worker in the stage, with all waits;
of an engine, the time in which its host or device worked from an iteration's begin to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.recording_names import UNKNOWN_TOKENS
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity
from verl_profiling.manifest import WEIGHT_SYNC, CaptureResult
from verl_profiling.numbers.columns import AchievedRow, WorkRow
from verl_profiling.numbers.device_peaks import PEAK_OF
from verl_profiling.numbers.lost import working_spans
from verl_profiling.numbers.model_shape import TRAINING, ModelShape, shape_of
from verl_profiling.slices.intervals import (
    Ints,
    covered_before,
    grouped,
    holding,
    length,
    time_of,
    union,
)
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.requests import VALIDATE

CRITIC = "critic"
WHOLE_STEP = "(step)"
"""Stage of the row with all operations of a lane, over the duration of the step."""
_OF_CRITIC = ("update_critic", "values")
_SHARED_BY = ("tp", "pp", "cp", "sp")
"""Parallel dimensions whose ranks get the same batch, and share its work."""
PASS_MODEL = 'pass the model to see how far stages are from the limit: "model": config.to_dict()'
_PASS_LENGTHS = 'pass lengths: with stage("{0}").given(lengths=lengths)'


class Models:
    """The shapes of the run's models by role.

    Args:
        settings: The settings of the run, as in ``run.json``.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._common = settings.get("model")
        self._roles: Mapping[str, Any] = settings.get("roles") or {}

    def of(self, role: str) -> ModelShape | str:
        """Return the shape of a role's model, or why it is unknown.

        A critic's model may be another one than the policy, so it has to be set.
        """
        own = (self._roles.get(role) or {}).get("model")
        config = own or (None if role == CRITIC else self._common)
        if not isinstance(config, dict):
            where = f'"roles": {{"{role}": {{"model": ...}}}}' if role == CRITIC else ""
            return f"{PASS_MODEL} {where}".strip()
        return shape_of(config, has_head=role != CRITIC)


def achieved_rows(
    step: Step, work: Sequence[WorkRow], models: Models
) -> tuple[list[AchievedRow], list[str]]:
    """Return a row for each lane and stage with known operations, and what is unknown.

    Args:
        step: The step.
        work: The work given to workers.
        models: The shapes of the models.
    """
    rows: list[AchievedRow] = []
    unknown: dict[str, None] = {}
    workers = {worker.name: worker for worker in step.workers}
    for name, of_worker in grouped(work, lambda row: row.worker).items():
        if name in workers and not workers[name].identity.is_engine:
            rows += _of_worker(workers[name], of_worker, step, models, unknown)
    for lane in step.lanes:
        if lane.is_engine and len(lane.iterations):
            rows += _of_engine(lane, step, models.of(ROLLOUT_ROLE), unknown)
    if not rows and not any(lane.on_device for lane in step.lanes):
        unknown.clear()  # on CPUs, the limit is of little interest
    for row in filter(_is_impossible, rows):
        rates = f"{row.teraflops:,.0f} TFLOP/s and {row.gigabytes or 0:,.0f} GB/s"
        unknown[f"{row.lane} cannot reach {rates} in {row.stage}: lengths or model are wrong"] = (
            None
        )
    rows = [row for row in rows if not _is_impossible(row)]
    for name, of_lane in grouped(rows, lambda row: row.lane).items():
        flops = sum(row.operations for row in of_lane)
        rows.append(_row(name, WHOLE_STEP, of_lane[0].device, step.span_ns, flops))
    return rows, list(unknown)


def _is_impossible(row: AchievedRow) -> bool:
    return max(row.compute_share or 0, row.memory_share or 0) > 1


def _of_worker(
    worker: CaptureResult,
    work: Sequence[WorkRow],
    step: Step,
    models: Models,
    unknown: dict[str, None],
) -> list[AchievedRow]:
    """Return the rows of a training worker."""
    lanes = [lane for lane in step.lanes if lane.source.worker == worker.name]
    device = lanes[0].model if len(lanes) == 1 and lanes[0].on_device else ""
    rows = []
    for stage in dict.fromkeys(span.name for span in worker.stages):
        passes = _passes(stage)
        if not passes:
            continue
        given = _given(worker, stage, work)
        shape = models.of(CRITIC if stage in _OF_CRITIC else worker.identity.role)
        if isinstance(shape, str):
            unknown[shape] = None
        elif given is None or given.tokens is None or given.tokens_squared is None:
            unknown[_PASS_LENGTHS.format(stage)] = None
        else:
            pairs = (given.tokens_squared + given.tokens) / 2
            flops = passes * shape.forward(given.tokens, pairs, given.tokens)
            took_ns = length(time_of(worker.stages, stage))
            rows.append(_row(worker.name, stage, device, took_ns, flops / _ranks(worker.identity)))
    return rows


def _passes(stage: str) -> int:
    """Return the forward passes that a stage is worth: 0 for a stage without a model, or an unknown
    one.
    """
    if stage.startswith("update_") and stage != WEIGHT_SYNC:
        return TRAINING
    return int(stage.endswith("log_prob") or stage in _OF_CRITIC)


def _given(worker: CaptureResult, stage: str, work: Sequence[WorkRow]) -> WorkRow | None:
    """Return the work of a stage, else of the stages inside it, such as micro-batches."""
    rows = {row.stage: row for row in work}
    if stage in rows:
        return rows[stage]
    time = time_of(worker.stages, stage)
    inside = []
    for name, row in rows.items():
        begins = np.array([span.begin_ns for span in worker.stages if span.name == name], np.int64)
        if holding(time, begins).all():  # else a part of the work is another stage's
            inside.append(row)
    return max(inside, key=lambda row: row.tokens or 0, default=None)


def _ranks(identity: WorkerIdentity) -> int:
    """Return the number of ranks that share a batch."""
    return prod(identity.sizes.get(name, 1) for name in _SHARED_BY)


def _of_engine(
    lane: Lane, step: Step, shape: ModelShape | str, unknown: dict[str, None]
) -> list[AchievedRow]:
    """Return the rows of an engine's rank: prefill, and decode."""
    if isinstance(shape, str):
        unknown[shape] = None
        return []
    is_used = ~holding(step.during(VALIDATE), lane.iterations[:, 0])
    iterations = lane.iterations[is_used]
    known = _with_attention(iterations, lane, step)
    if known is None:
        unknown["the lengths of the sequences in each iteration of the engine are unknown"] = None
        return []
    pairs, cached = known
    ranks = sum(other.source.worker == lane.source.worker for other in step.lanes)
    work = union(lane.busy, lane.iterations[:, :2])
    last_ns = max([step.end_ns, *working_spans(lane, step)[-1:, 1].tolist()])
    took = np.diff(covered_before(work, np.append(lane.iterations[:, 0], last_ns)))[is_used]
    tokens, new = iterations[:, 2:5].sum(axis=1), iterations[:, 3]
    is_prefill = iterations[:, 2] > 0
    device = lane.model if lane.on_device else ""
    rows = []
    for stage, chosen in (("prefill", is_prefill), ("decode", ~is_prefill & (tokens > 0))):
        if not chosen.any():
            continue
        # The output layer for the last tokens of prompts is left out: one of many tokens.
        flops = shape.forward(tokens[chosen].sum(), pairs[chosen].sum(), new[chosen].sum())
        read = None
        if stage == "decode" and shape.bytes is not None:
            many = zip(tokens[chosen].tolist(), cached[chosen].tolist(), strict=True)
            read = sum(shape.bytes_read(*sizes) or 0.0 for sizes in many) / ranks
        took_ns = int(took[chosen].sum())
        rows.append(_row(lane.name, stage, device, took_ns, float(flops) / ranks, read))
    return rows


def _with_attention(
    iterations: Ints, lane: Lane, step: Step
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the pairs and cached lengths of each iteration; ``None`` if they are unknown.

    Without detailed names of iterations, they are averages over the engine's requests, if these
    have all prompt tokens of the iterations.
    """
    if (iterations[:, 2:5] == UNKNOWN_TOKENS).any():
        return None
    if (iterations[:, 5:] != UNKNOWN_TOKENS).all():
        return iterations[:, 5].astype(float), iterations[:, 6].astype(float)
    prompts = pairs = generated = lengths = 0.0
    for row in step.requests:
        if row.replica == lane.source.replica and not row.validate:
            prompt, cached = row.prompt_tokens, row.cached_tokens or 0
            prompts += prompt - cached
            pairs += (prompt * (prompt + 1) - cached * (cached + 1)) / 2
            later = max(row.response_tokens - 1, 0)  # the first token comes with the prompt
            generated += later
            lengths += later * prompt + later * (later + 1) / 2
    if not prompts or prompts != iterations[:, 2].sum():
        return None
    average = lengths / generated if generated else 0.0
    of_new = average * iterations[:, 3:5].sum(axis=1)
    return of_new + pairs / prompts * iterations[:, 2], of_new


def _row(
    lane: str,
    stage: str,
    device: str,
    took_ns: int,
    operations: float,
    read: float | None = None,
) -> AchievedRow:
    """Return a row; shares need a device with a known peak."""
    seconds = max(took_ns, 1) / 1e9
    teraflops = operations / seconds / 1e12
    gigabytes = None if read is None else read / seconds / 1e9
    peak = PEAK_OF.get(device)
    compute_share = memory_share = None
    if peak is not None:
        compute_share = teraflops / peak.tflops
        if gigabytes is not None:
            memory_share = gigabytes / (1000 * peak.bandwidth)
    return AchievedRow(
        lane=lane,
        stage=stage,
        device=device,
        duration_us=took_ns / 1000,
        operations=operations,
        teraflops=float(f"{teraflops:.4g}"),
        compute_share=compute_share,
        gigabytes=None if gigabytes is None else float(f"{gigabytes:.4g}"),
        memory_share=memory_share,
    )
