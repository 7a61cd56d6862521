"""Captures with the real torch_npu, run by ``test_npu.py`` in a process
that sees the stand-in CANN.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import msgspec
import torch
import torch_npu

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture.session import process_session
from verl_profiling.files.run_files import read_manifest
from verl_profiling.tools.npu import Metrics, NpuOptions, NpuTool
from verl_profiling.workers import CaptureMixin

OUTCOMES = "outcomes.json"
HOST_ONLY = {"activities": ["cpu"]}


def main(root: Path) -> None:
    scenarios: list[Callable[[Path], Any]] = [
        e2e_with_callback,
        discrete,
        device_asked_for,
        beside_torch_profiler,
        own_profiler_running,
        unwritable,
        mini_batches,
        stop_on_another_thread,
        analysis_too_slow,
        memory,
        memory_by_stage,
        levels_and_metrics,
    ]
    results = {scenario.__name__: scenario(root / scenario.__name__) for scenario in scenarios}
    (root / OUTCOMES).write_bytes(msgspec.json.encode(results))


def work(rounds: int = 4) -> None:
    square = torch.ones(32, 32)
    for _ in range(rounds):
        square = square @ square / 32


def worker(mode: str = "e2e", **options: Any) -> CaptureMixin:
    """Return a worker that records with the npu tool."""
    mixin = CaptureMixin()
    settings = {"enable": True, "tool": "npu", "mode": mode, "tools": {"npu": options or HOST_ONLY}}
    mixin.init_capture(settings, role="actor")
    return mixin


def request(folder: Path, step: int = 1) -> CaptureStart:
    """Return a request to capture a step into a folder."""
    return CaptureStart(capture_id=uuid4().hex, run_id="run", step=step, folder=str(folder))


def stop(mixin: CaptureMixin) -> dict[str, Any]:
    """Stop, wait for the analysis, and return the result with the artifacts as they ended up."""
    plain: dict[str, Any] = msgspec.to_builtins(mixin.stop_capture(finish_s=120).result)
    return plain


def e2e_with_callback(root: Path) -> Any:
    """A whole step, driven by the callback, down to the manifest."""
    config = {
        "enable": True,
        "tool": "npu",
        "save_path": str(root),
        "schedule": {"steps": [2]},
        "tools": {"npu": HOST_ONLY},
    }
    callback = ProfilingCallback(config)
    mixin = CaptureMixin()
    mixin.init_capture(config, role="actor", rank=3)
    callback.add_workers("actor", mixin)
    callback.on_train_begin()
    for step in (1, 2, 3):
        callback.on_step_begin(step)
        with stage("update_actor"):
            work()
        callback.on_step_end()
    callback.on_train_end()
    return {"folder": str(root / "step_000002"), "manifest": read_manifest(root / "step_000002")}


def discrete(root: Path) -> Any:
    mixin = worker("discrete")
    mixin.start_capture(request(root))
    for name in ("old_log_prob", "update_actor", "update_actor"):
        with stage(name):
            work()
    return stop(mixin)


def device_asked_for(root: Path) -> Any:
    """The default activities, on a machine whose device gives no data."""
    mixin = worker(level="level0")
    mixin.start_capture(request(root))
    with stage("update_actor"):
        work()
    return stop(mixin)


def beside_torch_profiler(root: Path) -> Any:
    mixin = worker()
    message = ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        try:
            mixin.start_capture(request(root))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        work()
    return {
        "message": message,
        "open": process_session().sink is not None,
        "ops": len(profiler.events()),
    }


def own_profiler_running(root: Path) -> Any:
    """The user already records with torch_npu; that recording is whole afterwards."""
    mixin = worker()
    api = torch_npu.profiler
    handler = api.tensorboard_trace_handler(str(root / "own"), analyse_flag=False)
    profiler = api.profile(activities=[api.ProfilerActivity.CPU], on_trace_ready=handler)
    profiler.start()
    message = ""
    try:
        mixin.start_capture(request(root / "ours"))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    work()
    profiler.stop()
    data = [
        file.stat().st_size for file in (root / "own").glob("*_ascend_pt/FRAMEWORK/torch.op_range")
    ]
    return {"message": message, "own_data": data}


def unwritable(root: Path) -> Any:
    """The step folder turns into a file after the capture was armed."""
    mixin = worker("discrete")
    root.mkdir(parents=True)
    mixin.start_capture(request(root / "step"))
    (root / "step").rmdir()
    (root / "step").write_text("in the way")
    with stage("update_actor"):
        work()
    return stop(mixin)


def mini_batches(root: Path) -> Any:
    mixin = worker(**HOST_ONLY, analysis=False, mini_batches={"wait": 1, "active": 1})
    mixin.start_capture(request(root))
    for _ in range(3):
        work()
        mixin.capture.step()
    return stop(mixin)


def stop_on_another_thread(root: Path) -> Any:
    """The stop arrives elsewhere; the thread that records does it at its next stage."""
    mixin = worker(**HOST_ONLY, analysis=False)
    mixin.start_capture(request(root))
    work()
    replies: list[dict[str, Any]] = []
    stopping = threading.Thread(target=lambda: replies.append(stop(mixin)))
    stopping.start()
    while stopping.is_alive():
        with stage("update_actor"):
            work(1)
    return replies[0]


def analysis_too_slow(root: Path) -> Any:
    """The analysis does not finish in its time."""
    mixin = worker(**HOST_ONLY, analysis_s=0.5)
    mixin.start_capture(request(root))
    work()
    return stop(mixin)


def memory(root: Path) -> Any:
    """The torch_memory tool beside the npu tool, with torch_npu's own history and snapshot."""
    mixin = CaptureMixin()
    settings = {
        "enable": True,
        "tool": ["npu", "torch_memory"],
        "tools": {"npu": {**HOST_ONLY, "analysis": False}, "torch_memory": {"max_entries": 100}},
    }
    mixin.init_capture(settings, role="actor")
    mixin.start_capture(request(root))
    recording = torch_npu._C._npu_isHistoryEnabled()
    with stage("update_actor"):
        work()
    result = stop(mixin)
    with (root / "actor_rank0.memory.pickle").open("rb") as file:
        keys = sorted(pickle.load(file))
    return {
        "recording": recording,
        "recording_after": torch_npu._C._npu_isHistoryEnabled(),
        "keys": keys,
        "result": result,
    }


def memory_by_stage(root: Path) -> Any:
    mixin = CaptureMixin()
    mixin.init_capture({"enable": True, "tool": "torch_memory", "mode": "discrete"}, role="actor")
    mixin.start_capture(request(root))
    for name in ("old_log_prob", "update_actor"):
        with stage(name):
            work()
    return stop(mixin)


def levels_and_metrics(root: Path) -> Any:
    """What torch_npu keeps of every level and metric that the tool takes;
    it resets what does not fit.
    """
    api = torch_npu.profiler
    changed, taken = [], 0
    for level in ("none", "level0", "level1", "level2"):
        for metrics in get_args(Metrics) if level in ("level1", "level2") else ("AiCoreNone",):
            options = NpuOptions(level=level, aic_metrics=metrics)
            profiler = NpuTool(options)._profiler(root / f"{level}_{metrics}", "lane")
            kept = profiler.prof_if.experimental_config
            name = "Level_none" if level == "none" else level.capitalize()
            expected = (getattr(api.ProfilerLevel, name), getattr(api.AiCMetrics, metrics), True)
            taken += 1
            if (kept._profiler_level, kept._aic_metrics, kept._mstx) != expected:
                changed.append([level, metrics])
    return {"taken": taken, "changed": changed}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
