"""What cannot run on CPU inside verl: its real classes,
driven as far as they go without an accelerator.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_loops import settings

from integrations.wheels import ROOT, run_python, sources
from verl_profiling import CaptureStateError, stage
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.testing import record_step

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

HERE = Path(__file__).parent


def answer_of(run: Any) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr[-4000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def test_verl_finds_the_installed_plugin(tmp_path: Path) -> None:
    """Where this package is installed nothing has to be named: verl loads its entry point."""
    program = "import sys, verl; print('verl_profiling.integrations.verl' in sys.modules)"
    environment = {
        key: text for key, text in os.environ.items() if not key.startswith("VERL_USE_EXTERNAL")
    }
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr


def test_groups_that_the_replay_buffer_drops_have_a_status() -> None:
    """Stale and filtered ones, of verl's own class."""
    import verl_profiling.integrations.verl  # noqa: F401
    from verl_profiling.trajectories.spans import later_statuses

    replay_buffer = pytest.importorskip("verl.trainer.ppo.v1.replay_buffer")

    buffer = SimpleNamespace(
        _metrics_prefix=lambda partition: partition,
        prompt_global_steps={"train": {}},
        _clear_groups=lambda partition, groups: None,
    )
    evict = replay_buffer.ReplayBuffer._evict_terminal_groups
    later_statuses.clear()
    evicted, *_ = evict(buffer, 7, "train", ({"old"}, {"equal"}, set(), Counter()))
    assert evicted == {"old", "equal"}
    assert {new.group: new.status for new in later_statuses} == {
        "old": "stale",
        "equal": "filtered",
    }


def test_buckets_of_weights_have_bytes_and_the_time_until_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verl's own sender and receiver, over shared memory: one tensor fits into each bucket."""
    import verl_profiling.integrations.verl  # noqa: F401

    module = pytest.importorskip("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    device = SimpleNamespace(synchronize=int, empty_cache=int, ipc_collect=int)
    monkeypatch.setattr(module, "get_torch_device", lambda: device)
    monkeypatch.setattr(module, "is_support_ipc", lambda: False)
    handle = f"ipc://{tempfile.mkdtemp()}/weights"
    weights = [(str(number), torch.full((200_000,), float(number))) for number in range(3)]
    loaded: list[float] = []

    def load(tensors: list[Any], is_last: bool) -> None:
        time.sleep(0.05)
        loaded.extend(tensor[0].item() for _, tensor in tensors)

    receiver = module.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    sender = module.BucketedWeightSender(handle, 1, use_shm=True)
    with record_step(settings(tool="spans"), tmp_path) as recorded:
        receiving = threading.Thread(target=receiver.receive_weights, args=(load,))
        receiving.start()
        with stage("update_weights"), stage("transfer"):
            asyncio.run(sender.async_send_weights(iter(weights)))
        receiving.join()
    assert loaded == [0.0, 1.0, 2.0]
    buckets = [span for span in recorded.result.stages if span.name == "bucket"]
    assert [(span.bytes, span.depth) for span in buckets] == 3 * [(800_000, 2)]
    assert all(span.end_ns - span.begin_ns >= 50_000_000 for span in buckets)


def test_buckets_of_sglang_last_until_the_next_one_is_taken(tmp_path: Path) -> None:
    """Verl's own generator: two tensors fit into each bucket, and the caller sends it."""
    from verl_profiling.integrations.verl.weight_buckets import hook_sglang_buckets

    utils = pytest.importorskip("verl.workers.rollout.sglang_rollout.utils")
    module = SimpleNamespace(get_named_tensor_buckets=utils.get_named_tensor_buckets)
    hook_sglang_buckets(module)
    weights = [(str(number), torch.zeros(100)) for number in range(3)]

    async def update() -> list[int]:
        sent = []
        async for bucket in module.get_named_tensor_buckets(iter(weights), 800, fusion_groups=()):
            await asyncio.sleep(0.02)
            sent.append(len(bucket))
        return sent

    with (
        record_step(settings(tool="spans"), tmp_path) as recorded,
        stage("update_weights"),
        stage("transfer"),
    ):
        assert asyncio.run(update()) == [2, 1]
    buckets = [span for span in recorded.result.stages if span.name == "bucket"]
    assert [(span.bytes, span.depth) for span in buckets] == [(800, 2), (400, 2)]
    assert all(span.end_ns - span.begin_ns >= 20_000_000 for span in buckets)


async def test_a_server_that_launches_in_its_own_way_runs_unprofiled(tmp_path: Path) -> None:
    """A subclass may launch without verl's method: it gets its weights,
    and says why it records nothing.
    """
    import verl_profiling.integrations.verl  # noqa: F401

    module = pytest.importorskip("verl.workers.rollout.vllm_rollout.vllm_async_server")
    server = object.__new__(type("OwnServer", (module.vLLMHttpServer,), {}))
    await server.set_global_steps(3)
    assert server.global_steps == 3
    assert "not set up" in (await server.stop_capture()).result.reason
    order = CaptureStart(capture_id="1", run_id="run", step=3, folder=str(tmp_path))
    with pytest.raises(CaptureStateError, match="not set up"):
        await server.start_capture(order)


def test_the_megatron_worker_is_captured(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Verl's worker with a Megatron engine knows its coordinates, and shows every micro-batch."""
    megatron = sources("megatron-core==0.16.1", pytestconfig.cache)
    run = run_python(str(HERE / "megatron_worker.py"), str(tmp_path), cwd=ROOT, paths=(megatron,))
    answer = answer_of(run)
    assert answer["identity"]["topology"] == {"tp": 0, "pp": 0, "cp": 0, "ep": 0, "dp": 0}
    result = answer["result"]
    assert result["status"] == "ok"
    stages = [(span["name"], span["depth"]) for span in result["stages"]]
    assert stages[:2] == [("update_actor", 0), ("forward-backward", 1)]
    assert stages[2:] == [("forward-compute", 2), ("backward-compute", 2)] * 3
