"""What a capture costs on a CUDA device, against torch.profiler and verl's profiler class doing the
same.

Run: ``python benchmarks/bench_gpu.py [ROUNDS]`` (default 7) on a machine with a GPU. verl 0.9.1 is
measured if it is installed. A step trains a Qwen2 of 12 layers on ten batches. What is compared
takes turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from results import record, row

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.workers import CaptureMixin

BATCHES = 10
WATCHED_STEPS = 120
NO_PROFILER = "a step without a profiler"
PARTS = {
    "step": ("profiled step", "ms"),
    "start": ("pause at start", "ms"),
    "stop": ("pause at stop", "ms"),
    "finished": ("until the file is complete", "ms"),
    "memory": ("memory", "MiB"),
}
ACTIVITIES = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

Side = Callable[[Path, Callable[[], None]], dict[str, float]]


class Training:
    """A model and its optimizer on the device."""

    def __init__(self) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        config = Qwen2Config(vocab_size=8192, **sizes, **heads)
        self.model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.tokens = torch.randint(8192, (8, 256), device="cuda")

    def step(self, batches: int = BATCHES) -> None:
        """Train on some batches, in a stage."""
        with stage("update_actor"):
            for _ in range(batches):
                self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            torch.cuda.synchronize()


def timed(function: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def used_mib() -> float:
    """Return the memory of the device that is in use, the driver's own included."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 2**20


def unprofiled(folder: Path, step: Callable[[], None]) -> dict[str, float]:
    """Run a step."""
    return {"step": timed(step)}


def with_torch(folder: Path, step: Callable[[], None]) -> dict[str, float]:
    """Run a step under torch's profiler, and export it as JSON."""
    profiler = torch.profiler.profile(activities=ACTIVITIES)

    def stop() -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "torch.json"))

    return measured(profiler.start, step, stop)


def with_verl(folder: Path, step: Callable[[], None]) -> dict[str, float]:
    """Run a step under verl's profiler, as its workers hold it."""
    from verl.utils.profiler.config import ProfilerConfig, TorchProfilerToolConfig
    from verl.utils.profiler.profile import DistProfiler

    tool = TorchProfilerToolConfig(contents=["cpu", "cuda"], discrete=False)
    settings = ProfilerConfig(
        tool="torch", enable=True, all_ranks=True, save_path=str(folder), tool_config=tool
    )
    profiler = DistProfiler(rank=0, config=settings, tool_config=tool)
    return measured(
        lambda: profiler.start(role="actor", profile_step="1"),
        step,
        lambda: profiler.stop(run_command=False),
    )


def with_ours(folder: Path, step: Callable[[], None]) -> dict[str, float]:
    """Run a step under a capture of a worker's mixin."""
    worker = CaptureMixin()
    worker.init_capture({"enable": True}, role="actor")
    request = CaptureStart(capture_id=folder.name, run_id="bench", step=1, folder=str(folder))
    found = measured(lambda: worker.start_capture(request), step, worker.stop_capture)
    begin = time.perf_counter()
    result = worker.stop_capture(finish_s=120.0).result
    if result is None or result.status != "ok":
        raise SystemExit(f"the capture failed: {result}")
    return found | {"finished": found["stop"] + 1e3 * (time.perf_counter() - begin)}


def measured(
    start: Callable[[], object], step: Callable[[], None], stop: Callable[[], object]
) -> dict[str, float]:
    """Return the milliseconds of a capture's parts,
    and the memory that it takes from the device.
    """
    before = used_mib()
    found = {"start": timed(start), "step": timed(step)}
    found["memory"] = used_mib() - before
    return found | {"stop": timed(stop)}


def watch(training: Training) -> dict[str, list[float]]:
    """Return milliseconds of each step of a loop, and of its hooks, without and with the watch."""
    found = defaultdict[str, list[float]](list)
    for enable in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "enable": True,
                "save_path": folder,
                "schedule": {"steps": [10**9]},
                "watch": {"enable": enable},
            }
            worker = CaptureMixin()
            worker.init_capture(config, role="actor")
            with ProfilingCallback(config) as profiling:
                profiling.add_workers("actor", [worker])
                for number in range(WATCHED_STEPS):
                    cpu = time.process_time()
                    begin = timed(partial(profiling.on_step_begin, number))
                    took = timed(lambda: training.step(1))
                    hooks = begin + timed(profiling.on_step_end)
                    if number >= WATCHED_STEPS // 5:
                        name = "watch" if enable else "off"
                        found[name].append(took)
                        found[f"{name} hooks"].append(hooks)
                        found[f"{name} cpu"].append(1e3 * (time.process_time() - cpu))
    return found


def main(rounds: int) -> None:
    """Measure, and write the table."""
    if not torch.cuda.is_available():
        print("SKIPPED: torch sees no CUDA device")
        return
    training = Training()
    sides: dict[str, Side] = {
        "no profiler": unprofiled,
        "torch.profiler": with_torch,
        "this package": with_ours,
    }
    try:
        import verl  # noqa: F401

        sides["verl's DistProfiler"] = with_verl
    except ImportError as error:
        print(f"verl is not measured: {error}")
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                for what, value in side(Path(folder), training.step).items():
                    if number:
                        found[name][what].append(value)
    step = found["no profiler"]["step"]
    rows = [row(NO_PROFILER, step, "ms")]
    for name in list(sides)[1:]:
        for what, (text, unit) in PARTS.items():
            if not (values := found[name].get(what)):
                continue
            against = NO_PROFILER if what == "step" else "torch.profiler"
            of = step if what == "step" else found[against]["stop" if what == "finished" else what]
            if name == against or not all(of):
                against, of = "", []
            rows.append(row(f"{name}: {text}", values, unit, against=against, of=of))
    watched = watch(training)
    for name, what in (("", "step"), (" hooks", "hooks of a step"), (" cpu", "CPU time of a step")):
        both = watched[f"watch{name}"], watched[f"off{name}"]
        rows.append(row(f"watch on: {what}", both[0], "ms", against="watch off", of=both[1]))
    record(
        "gpu",
        rows,
        method=(
            f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}; {rounds} rounds of "
            "all in turn, "
            f"and {len(watched['off'])} steps of one batch without and with the watch. "
            "The loop waits for the pauses; the file is complete when it is compressed and "
            "read back. "
            "Memory is what a capture after the first takes from the device."
        ),
        peers={
            "torch.profiler": "activities CPU and CUDA, no options, stop() and "
            "export_chrome_trace() as JSON",
            "verl's DistProfiler": "tool torch, contents [cpu, cuda], e2e, all ranks; verl 0.9.1",
        },
    )
    print(f"median step {statistics.median(found['no profiler']['step']):.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
