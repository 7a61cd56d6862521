"""Nsight Systems under verl: what its real classes start,
in a Ray cluster with a stand-in ``nsys``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools.nsys_stand_in import stand_in_cluster

from verl_profiling import ProfilingConfig
from verl_profiling.integrations.verl import launch as launching

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

SETTINGS = {"enable": True, "tool": "nsys", "schedule": {"steps": [2, 5]}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of a stand-in ``nsys`` that a real Ray cluster starts workers with."""
    # A group of workers keeps its share of the CPUs until the cluster ends.
    with stand_in_cluster(tmp_path_factory.mktemp("nsys"), num_cpus=16) as log:
        yield log


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[ProfilingConfig]:
    """Settings of a trainer that is profiled with nsys, until the test has ended."""
    yield ProfilingConfig.from_any({**SETTINGS, "save_path": str(tmp_path / "run")})
    launching._environment = {}


def started(log: Path) -> list[dict[str, str]]:
    """Return the options of every start of the stand-in so far."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def group_of(**options: Any) -> Any:
    """Return a worker group of verl with two workers that report how they were started."""
    import ray
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.base.worker import Worker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Telling(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def variables(self) -> dict[str, str]:
            return {
                name: value
                for name, value in os.environ.items()
                if "NSYS" in name or name == "RANK"
            }

    return RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Telling)),
        **options,
    )


def test_the_trainers_workers(cluster: Path, settings: ProfilingConfig, tmp_path: Path) -> None:
    """They start as for verl's own profiler, with our output, our number of ranges,
    and its variables.
    """
    before = len(started(cluster))
    launching.start_workers_under_nsys(settings)
    told = group_of(device_name="cuda").variables()
    output = f"{tmp_path}/run/nsys/actor"
    assert [variables["VERL_PROFILING_NSYS_OUTPUT"] for variables in told] == [output] * 2
    assert [variables["VERL_PROFILING_NSYS_RANGES"] for variables in told] == ["2", "2"]
    assert [variables["RANK"] for variables in told] == ["0", "1"]
    options = [option for option in started(cluster)[before:] if option["o"] == f"{output}.%p"]
    assert len(options) == 2, "besides those with which Ray looks whether nsys works"
    assert {option["capture-range-end"] for option in options} == {"repeat-shutdown:2"}
    assert {option["capture-range"] for option in options} == {"cudaProfilerApi"}


def test_other_groups(cluster: Path, settings: ProfilingConfig) -> None:
    """Groups of replicas, which verl names, and all groups of a trainer
    without nsys are started as ever.
    """
    before = len(started(cluster))
    launching.start_workers_under_nsys(settings)
    [first, _] = group_of(device_name="cuda", name_prefix="rollout_standalone_0").variables()
    assert "VERL_PROFILING_NSYS_OUTPUT" not in first
    launching.start_workers_under_nsys(ProfilingConfig.from_any({"enable": True, "tool": "spans"}))
    [first, _] = group_of(device_name="cuda").variables()
    assert "VERL_PROFILING_NSYS_OUTPUT" not in first
    assert len(started(cluster)) == before


def test_a_vllm_server(
    cluster: Path, settings: ProfilingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor is started under nsys where its configuration says so,
    and keeps the variables it had.
    """
    import ray
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    @ray.remote(num_cpus=1)
    class Server:
        def variables(self) -> dict[str, str]:
            return dict(os.environ)

    async def launch_servers(self: Any) -> None:
        self.started = self.server_class.options(
            runtime_env={"env_vars": {"OF_VERL": "1"}}
        ).remote()

    monkeypatch.setattr(vllm_async_server.vLLMReplica, "launch_servers", launch_servers)
    launching.hook_vllm_replica(vllm_async_server)
    launch = vllm_async_server.vLLMReplica.launch_servers
    for given, expected in (({"verl_profiling": settings.to_dict()}, "2"), ({}, None)):
        replica = SimpleNamespace(server_class=Server, config=SimpleNamespace(engine_kwargs=given))
        asyncio.run(launch(replica))
        variables = ray.get(replica.started.variables.remote())
        assert variables["OF_VERL"] == "1"
        assert variables.get("VERL_PROFILING_NSYS_RANGES") == expected
    assert started(cluster)[-1]["trace-fork-before-exec"] == "true"
