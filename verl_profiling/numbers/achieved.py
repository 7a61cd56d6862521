"""The operations per second that stages achieve, and the memory bandwidth of decoding.

Operations follow from the model's shape and the work that a stage was given, see
:mod:`~verl_profiling.numbers.model_shape`. Time is that of the worker in the stage, with all waits;
of an engine, the time in which its host or device worked from an iteration's begin to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.engine_iterations import UNKNOWN_TOKENS
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import NUMBER_BYTES, WEIGHT_SYNC, CaptureResult
from verl_profiling.numbers.device_peaks import PEAK_OF
from verl_profiling.numbers.model_shape import TRAINING, ModelShape, shape_of
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
