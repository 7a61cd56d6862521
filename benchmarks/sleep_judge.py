"""Which part of an engine's sleep and wake the report names as the dearest, against stopwatches.

Run: ``make sleep-judge``. The code is that of vLLM's and SGLang's own workers; what a device does
(copies, mapping of memory) is a stand-in that sleeps, as there is none. In each step another part
is slow. Only the reports of the captured steps are read.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_profiling import ProfilingCallback
from verl_profiling.analysis import open_run
from verl_profiling.integrations import engine_plugin
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

SLOW_S, USUAL_S, MANY = 0.3, 0.03, 3
BYTES = 1 << 20
PARTS = {
    "vllm": "sleep/pin sleep/offload sleep/release wake/reserve wake/weights reset_cache",
    "sglang": "sleep/kv_cache sleep/weights sleep/reset_cache wake/weights wake/kv_cache",
}
Calls = tuple[Callable[[], object], ...]


class Device:
    """Takes the time of a part, which is longer for the slow one."""

    def __init__(self) -> None:
        self.took_s: defaultdict[str, float] = defaultdict(float)
        self.slow, self.phase = "", ""

    def work(self, part: str) -> None:
        begin_s = time.perf_counter()
        time.sleep((SLOW_S if part == self.slow else USUAL_S) / MANY)
        self.took_s[part] += time.perf_counter() - begin_s


def vllm(device: Device) -> Calls:
    """Return sleep, wake and the reset of the cache, of vLLM's worker and core."""
    import torch
    from vllm import device_allocator
    from vllm.device_allocator import cumem, sleep_mode_backend
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    empty = torch.empty

    def pinned(*args: Any, **kwargs: Any) -> Any:
        if "pin_memory" in kwargs:
            device.work("sleep/pin")
            kwargs["pin_memory"] = False
        return empty(*args, **kwargs)

    class Runtime:
        def cudaMemcpy(self, to: int, at: int, count: int) -> None:
            device.work("sleep/offload" if device.phase == "sleep" else "wake/weights")

    torch.empty = pinned
    torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None
    torch.accelerator.get_memory_info = lambda: (1 << 30, 1 << 33)
    module: Any = cumem
    module.libcudart, module.cumem_available = Runtime(), True
    module.python_unmap_and_release = lambda *_: device.work("sleep/release")
    module.python_create_and_map = lambda *_: device.work("wake/reserve")
    allocator = cumem.CuMemAllocator.get_instance()
    for at in range(MANY):
        handle = (0, BYTES, at, 0)
        allocator.pointer_to_data[at] = device_allocator.AllocationData(handle, "weights")
    device_allocator.get_mem_allocator_instance = lambda: allocator
    backend = sleep_mode_backend.CuMemBackend()
    worker: Any = SimpleNamespace(
        sleep_mode_backend=backend,
        _get_sleep_mode_backend=lambda: backend,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        model_runner=SimpleNamespace(post_kv_cache_wake_up=lambda: None),
        synchronize_device=lambda: None,
        _sleep_saved_buffers={},
        _sleep_saved_draft_buffers={},
        _sleep_saved_parameters={},
    )
    scheduler = SimpleNamespace(reset_prefix_cache=lambda *_: device.work("reset_cache"))
    core: Any = SimpleNamespace(scheduler=scheduler)
    return (
        lambda: Worker.sleep(worker, 1),
        lambda: Worker.wake_up(worker),
        lambda: [EngineCore.reset_prefix_cache(core) for _ in range(MANY)],
    )


def sglang(device: Device) -> Calls:
    """Return release and resume of SGLang's scheduler, which resets its cache itself."""
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.utils import torch_memory_saver_adapter

    adapter: Any = torch_memory_saver_adapter._TorchMemorySaverAdapterReal

    def saver(self: Any, tag: str) -> None:
        for _ in range(MANY):
            device.work(f"{device.phase}/{tag}")

    def reset() -> None:
        for _ in range(MANY):
            device.work("sleep/reset_cache")

    adapter.pause = adapter.resume = saver
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    clears = SimpleNamespace(clear=lambda: None)
    scheduler: Any = SimpleNamespace(
        is_fully_idle=lambda: True,
        offload_tags=set(),
        memory_saver_adapter=adapter(),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.BatchNorm1d(8))),
        tp_cpu_group=None,
        tree_cache=SimpleNamespace(reset=reset),
        req_to_token_pool=clears,
        token_to_kv_pool_allocator=clears,
        grammar_manager=clears,
        reset_metrics=lambda: None,
        draft_worker=None,
        device_module=SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None),
    )
    scheduler.flush_cache = lambda: Scheduler.flush_cache(scheduler)
    request: Any = SimpleNamespace(tags=["kv_cache", "weights"])
    return (
        lambda: Scheduler.release_memory_occupation(scheduler, request),
        lambda: Scheduler.resume_memory_occupation(scheduler, request),
        lambda: None,
    )


def judged(engine: str, folder: Path) -> list[dict[str, Any]]:
    """Return for each slow part what the finding names, and the largest error of a part."""
    config = {"enable": True, "save_path": str(folder), "tool": "spans", "schedule": {"every": 1}}
    RolloutCaptureMixin.engine_args(config, engine="sglang")
    device = Device()
    sleep, wake, reset = {"vllm": vllm, "sglang": sglang}[engine](device)
    getattr(engine_plugin, f"in_{engine}")()
    gc.collect()
    gc.freeze()  # else the garbage of the engine's imports is the dearest part
    server = RolloutCaptureMixin()
    server.init_capture(config, requests=RequestLog())
    parts = PARTS[engine].split()
    truth = []
    with ProfilingCallback(config) as callback:
        callback.add_rollout([server])
        for step, device.slow in enumerate(parts, start=1):
            device.took_s.clear()
            callback.on_step_begin(step)
            with callback.stage("update_weights"):
                device.phase = "sleep"
                sleep()
                device.phase = "wake"
                wake()
                reset()
            callback.on_step_end()
            truth.append(dict(device.took_s))
    rows = []
    for part, took, captured in zip(parts, truth, open_run(folder).steps(), strict=True):
        report = captured.report()
        [said] = [one.text for one in report.findings if one.rule == "sleep_and_wake"]
        errors = []
        for name, seconds in took.items():
            spans = [span for span in report.gantt if span.name == name]
            measured = sum(span.end_us - span.begin_us for span in spans) / 1e6
            errors.append(abs(measured / seconds - 1))
        is_named = f"most of it {part}: " in said
        rows.append({"engine": engine, "part": part, "named": is_named, "error": max(errors)})
        print(f"{part}: {said}", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        rows = judged(arguments.engine, Path(folder))
    print(json.dumps(rows, indent=1))
    named, error = sum(row["named"] for row in rows), max(row["error"] for row in rows)
    print(f"{named} of {len(rows)} named, largest error of a part {error:.1%}")
    sys.exit(named < len(rows) or error > 0.02)


if __name__ == "__main__":
    main()
