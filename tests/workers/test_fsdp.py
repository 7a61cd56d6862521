"""The FSDP mixin, with real FSDP2 over gloo in two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from example_loops import request, settings, spans
from rank_processes import start_forkserver

from verl_profiling import CaptureStateError, stage
from verl_profiling.analysis import open_step
from verl_profiling.capture.session import Session, process_session
from verl_profiling.manifest import CaptureResult
from verl_profiling.workers import FSDPCaptureMixin, MegatronCaptureMixin


class Worker(FSDPCaptureMixin):
    def __init__(self) -> None:
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        self.model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=self.mesh)

    @stage("update_actor")
    def update(self) -> None:
        import torch

        self.model(torch.randn(8, 16)).square().mean().backward()


def train(rank: int, folder: Path, config: dict[str, Any]) -> None:
    import msgspec
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    worker = Worker()
    worker.init_capture(config, role="actor", mesh=worker.mesh)
    worker.update()
    started = worker.start_capture(request(folder))
    worker.update()
    reply = worker.stop_capture("run-1", 60)
    assert started.status in ("recording", "skipped")
    if started.status == "recording":
        assert [artifact.status for artifact in reply.result.artifacts] == ["ok"], reply
    (folder / f"result{rank}.json").write_bytes(msgspec.json.encode(reply.result))
    dist.destroy_process_group()
    os._exit(
        0
    )  # torch 2.13 aborts now and then (1 of 30 without this package) in the exit handlers of FSDP


def run_two(folder: Path, **given: Any) -> list[CaptureResult]:
    import msgspec
    import torch.multiprocessing as mp

    start_forkserver()
    mp.start_processes(
        train, (folder, settings(**given).to_dict()), nprocs=2, start_method="forkserver"
    )
    return [
        msgspec.json.decode((folder / f"result{rank}.json").read_bytes(), type=CaptureResult)
        for rank in (0, 1)
    ]


def test_ranks_and_mesh_are_read_and_select(tmp_path: Path) -> None:
    """Identity from the process group, topology from the mesh;
    the last rank along ``dp`` alone records.
    """
    first, last = run_two(tmp_path, select={"dp": -1})
    assert (first.status, last.status) == ("skipped", "ok")
    identity = last.identity
    assert (identity.rank, identity.world_size, identity.topology, identity.sizes) == (
        1,
        2,
        {"dp": 1},
        {"dp": 2},
    )
    assert [path.name for path in tmp_path.glob("*.gz")] == ["actor_rank1.torch.json.gz"]
    names = [event["name"] for event in spans(tmp_path / "actor_rank1.torch.json.gz")]
    assert any(name.startswith("FSDP::all_gather") for name in names)
    assert any(name.startswith("gloo:") for name in names)
    assert names.count("update_actor") == 1


def test_the_bytes_of_collectives_are_those_of_the_parameters(tmp_path: Path) -> None:
    """Forward and backward gather each layer, then its gradients are reduced."""
    run_two(tmp_path)
    rows = {row.name: row for row in open_step(tmp_path).report().links}
    of_layers = 4 * (16 * 16 + 16 + 16 * 4 + 4)  # bytes
    assert (rows["all_gather"].calls, rows["all_gather"].bytes) == (4, 2 * of_layers)
    assert (rows["all_reduce"].calls, rows["all_reduce"].bytes) == (2, of_layers)
    assert all(row.bus_bytes_per_s and row.ranks == 2 for row in rows.values())


@pytest.mark.parametrize("mixin", [FSDPCaptureMixin, MegatronCaptureMixin])
def test_switched_off_needs_neither_process_group_nor_megatron(mixin: type[Any]) -> None:
    for config in (None, {"enable": False}):
        mixin().init_capture(config, role="actor")


def test_without_a_process_group_the_rank_must_be_given(tmp_path: Path, session: Session) -> None:
    worker = FSDPCaptureMixin()
    with pytest.raises(
        CaptureStateError,
        match=r"do so first by init_process_group\(\), or pass rank and world_size",
    ):
        worker.init_capture(settings(tool="spans"), role="actor")
    with pytest.raises(CaptureStateError, match="not initialised"):
        worker.init_capture(settings(tool="spans"), role="actor", rank=0)
    worker.init_capture(settings(tool="spans"), role="actor", rank=3, world_size=8)
    worker.start_capture(request(tmp_path))
    identity = process_session().stop("run-1").result.identity
    assert (identity.rank, identity.world_size, identity.topology) == (3, 8, {})
