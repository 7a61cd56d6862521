"""The stages that verl's own methods and functions become."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_loops import settings

from verl_profiling.capture.session import process_session
from verl_profiling.testing import record_step

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

ACTOR = ("compute_log_prob", "compute_ref_log_prob", "update_actor", "update_weights")
CRITIC = ("infer_batch", "train_mini_batch")
CHECKPOINTS = ("save_checkpoint", "load_checkpoint")


@pytest.mark.parametrize(
    ("worker_class", "name"),
    [
        *(("ActorRolloutRefWorker", name) for name in (*ACTOR, *CHECKPOINTS)),
        *(("TrainingWorker", name) for name in (*CRITIC, *CHECKPOINTS)),
    ],
)
def test_stages_leave_verls_methods_as_they_are(worker_class: str, name: str) -> None:
    """A marked method keeps verl's registration, its signature, and whether it is a coroutine."""
    import verl_profiling.integrations.verl  # noqa: F401

    workers = pytest.importorskip("verl.workers.engine_workers")
    from verl.single_controller.base.decorator import MAGIC_ATTR

    method = getattr(getattr(workers, worker_class), name)
    original = method.__wrapped__
    assert getattr(method, MAGIC_ATTR) == getattr(original, MAGIC_ATTR)
    assert inspect.signature(method) == inspect.signature(original)
    assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(original)


class StageNames:
    """A receiver of stages that keeps their names, in the order in which they begin."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, name: str) -> None:
        self.names.append(name)

    def end(self, name: str, failed: bool) -> None:
        pass


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the stages that this process goes through."""
    import verl_profiling.integrations.verl  # noqa: F401

    stages = StageNames()
    monkeypatch.setattr(process_session(), "sink", stages)
    return stages.names


async def test_a_workers_weight_update_has_its_parts(tmp_path: Path) -> None:
    """Long makings of tensors are recorded each, short ones together; set up twice,
    it is marked once.
    """
    workers = pytest.importorskip("verl.workers.engine_workers")

    class Engine:
        engine_config = SimpleNamespace(strategy="fsdp2")

        def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, float]], None]:
            return self.tensors(), None

        def tensors(self) -> Iterator[tuple[str, float]]:
            for number in range(40):
                time.sleep(0.02 if number < 2 else 0.0002)
                yield f"layer.{number}", 1.0

    class Backend:
        async def send_weights(
            self, weights: Iterator[Any], global_steps: int | None
        ) -> dict[str, float]:
            return {"sent": len(list(weights))}

    worker = object.__new__(workers.ActorRolloutRefWorker)
    worker.actor, worker.checkpoint_engine = SimpleNamespace(engine=Engine()), Backend()
    worker._rank, worker._world_size = 0, 1
    for _ in range(2):
        worker.init_capture(settings(tool="spans"), "actor")
    with record_step(settings(tool="spans"), tmp_path) as recorded:
        assert await worker.update_weights(global_steps=1, mode="nccl") == {"sent": 40}
    found = [
        (span.name, span.depth, span.end_ns - span.begin_ns) for span in recorded.result.stages
    ]
    assert [one[:2] for one in found[:3]] == [("update_weights", 0), ("gather", 1), ("transfer", 1)]
    made = [took for name, depth, took in found[3:] if (name, depth) == ("gather", 2)]
    assert len(made) == len(found) - 3
    assert min(made[:2]) >= 20_000_000
    assert 3 <= len(made) < 40
    assert 46_000_000 <= sum(made) <= found[2][2]


@pytest.mark.parametrize("trainer", ["V1", "V0"])
def test_the_actor_without_its_adapter_is_the_reference(
    trainer: str, marked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LoRA one method computes both: the flag that verl's trainers set says which
    of the two it is.
    """
    workers = pytest.importorskip("verl.workers.engine_workers")
    import transfer_queue
    from verl.utils import tensordict_utils, transferqueue_utils

    monkeypatch.setattr(transferqueue_utils, "TQ_INITIALIZED", True)
    monkeypatch.setattr(transferqueue_utils, "kv_batch_meta2batch_meta", lambda meta: meta)
    monkeypatch.setattr(transferqueue_utils, "_meta_to_realdata", lambda meta: meta.extra_info)
    computed: list[Any] = []
    worker = object.__new__(workers.ActorRolloutRefWorker)
    worker.enable_routing_replay = False
    worker.query_collect_info = lambda mesh_name: True
    worker.actor = SimpleNamespace(infer_batch=computed.append)
    for facts in ({}, {"no_lora_adapter": False}, {"no_lora_adapter": True}):
        if trainer == "V1":
            worker.compute_log_prob(
                transfer_queue.KVBatchMeta(
                    partition_id="train", keys=["a"], tags=[{}], extra_info=facts
                )
            )
        else:
            tensors = {"input_ids": torch.zeros(1, 2)}
            worker.compute_log_prob(tensordict_utils.get_tensordict(tensors, non_tensor_dict=facts))
    assert len(computed) == 3
    assert marked == ["old_log_prob", "old_log_prob", "ref_log_prob"]


def test_what_is_moved_to_the_host_and_back_is_a_stage(marked: list[str]) -> None:
    """With offloading, an FSDP engine's model and optimizer are moved by functions
    with a stage each.
    """
    module = pytest.importorskip("verl.workers.engine.fsdp.transformer_impl")
    engine = object.__new__(module.FSDPEngine)
    engine.engine_config = SimpleNamespace(forward_only=False)
    engine.module = torch.nn.Linear(2, 2)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.to("cpu")
    engine.to("cpu", model=False, grad=False)
    assert marked == ["offload_model", "offload_optimizer", "offload_optimizer"]
    assert {module.load_fsdp_model_to_gpu.__name__, module.load_fsdp_optimizer.__name__} == {
        "load_fsdp_model_to_gpu",
        "load_fsdp_optimizer",
    }
