"""What profiling costs a real verl run on CPU: unprofiled steps, profiled steps, and pauses.

Run with real verl (``make env-verl``), in parts if need be::

    .venv-verl/bin/python benchmarks/bench_verl.py hooks
    .venv-verl/bin/python benchmarks/bench_verl.py steps 3      # 3 pairs of runs
    .venv-verl/bin/python benchmarks/bench_verl.py profilers 2  # 2 pairs, for each of two contents

Every figure is of whole runs of ``recipes/verl_grpo_cpu``; what is compared alternates.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "recipes.verl_grpo_cpu.cpu_platform"
PLUGIN = "verl_profiling.integrations.verl"
PROBE = "benchmarks.verl_probe"
WARM_UP = 4  # the first steps are slower
UNPROFILED, PROFILED = 24, 8
CONTENTS = {"cpu": "[cpu]", "cpu, stack, shapes, memory": "[cpu,stack,shapes,memory]"}


@dataclass
class Step:
    """One step of a run, as its trainer sees it."""

    begin_ns: int
    took_ns: int
    hooks: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    pauses: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    @property
    def own_ns(self) -> int:
        """The hooks' own time, in all processes together."""
        return sum(sum(times) for times in self.hooks.values())


def run(measured: str, steps: int, *overrides: str, plugin: bool = True) -> list[Step]:
    """Run verl; return its steps without the first ones."""
    with tempfile.TemporaryDirectory(prefix="verl-") as folder:
        lines = Path(folder) / "lines"
        lines.mkdir()
        command = [
            str(ROOT / "recipes/verl_grpo_cpu/run.sh"),
            f"trainer.total_training_steps={WARM_UP + steps}",
            "trainer.total_epochs=100",
            f"profiling.save_path={folder}/profiling",
            f"hydra.run.dir={folder}",
            *overrides,
        ]
        loaded = [PLATFORM, *([PLUGIN] if plugin and measured != "hooks" else []), PROBE]
        variables = {
            **os.environ,
            "PYTHON": sys.executable,
            "RAY_TMPDIR": folder,
            "PLUGINS": ",".join(loaded),
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "VERL_PROBE": str(lines),
            "VERL_PROBE_OF": measured,
        }
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return steps_of([json.loads(line) for path in lines.iterdir() for line in path.open()])


def steps_of(lines: Iterable[tuple[str, str, int, int]]) -> list[Step]:
    """Return the steps with what happened in them."""
    lines = list(lines)
    steps = sorted((Step(begin, took) for kind, _, begin, took in lines if kind == "step"), key=_begin)
    for kind, name, begin, took in lines:
        for step in steps:
            if step.begin_ns <= begin <= step.begin_ns + step.took_ns:
                if kind == "hook":
                    step.hooks[name].append(took)
                elif kind in ("start", "stop"):
                    step.pauses[kind] = step.pauses.get(kind, 0) + took
                elif kind == "call":
                    step.calls += 1
    return steps[WARM_UP:]


def _begin(step: Step) -> int:
    return step.begin_ns


def ms(times_ns: Iterable[float]) -> str:
    """Return a median in milliseconds, and the range."""
    times = sorted(time / 1e6 for time in times_ns)
    return f"{statistics.median(times):8.2f} ms ({times[0]:.2f} to {times[-1]:.2f})"


def hooks() -> None:
    """Print the hooks' own time on steps that are not profiled, and the calls made there."""
    steps = run("hooks", UNPROFILED, "profiling=e2e", "profiling.schedule.steps=[2]")
    own = statistics.median(step.own_ns for step in steps)
    took = statistics.median(step.took_ns for step in steps)
    print(f"{len(steps)} unprofiled steps of a run in which another step is profiled")
    print(f"  a step                                     {ms(s.took_ns for s in steps)}")
    print(f"  the hooks' own time, all processes         {ms(s.own_ns for s in steps)}")
    print(f"  share of the step                          {own / took:9.4%}   (goal: 0.1%)")
    print(f"  calls by which a capture is driven         {sum(s.calls for s in steps)}")
    for name in sorted(steps[0].hooks):
        times = [time for step in steps for time in step.hooks[name]]
        each = statistics.median(times) / 1000
        print(f"    {name:28} {len(times) / len(steps):5.1f} a step, {each:6.1f} us each")


def steps(pairs: int) -> None:
    """Print medians of the steps of alternating runs with and without the plugin."""
    medians: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(pairs):
        for plugin in (False, True):
            given = (
                ["profiling=e2e", "profiling.schedule.steps=[2]"] if plugin else ["profiling.enable=false"]
            )
            taken = run("steps", UNPROFILED, *given, plugin=plugin)
            medians[plugin].append(statistics.median(step.took_ns for step in taken))
    print(f"medians of {UNPROFILED} unprofiled steps in each of {pairs} alternating runs")
    for plugin, name in ((False, "without the plugin"), (True, "with the plugin")):
        print(f"  {name:24} {ms(medians[plugin])}")
    ratio = statistics.median(medians[True]) / statistics.median(medians[False])
    print(f"  with / without           {ratio:8.3f}")


def profilers(pairs: int) -> None:
    """Print profiled steps with this package and with verl's own torch profiler, same contents."""
    profiled = list(range(WARM_UP + 1, WARM_UP + PROFILED + 1))
    for name, contents in CONTENTS.items():
        taken: dict[str, list[Step]] = {"verl": [], "ours": []}
        flags = [
            f"+profiling.tools.torch.{option}={option in contents}"
            for option in ("stack", "shapes", "memory")
        ]
        settings = {
            "verl": [
                "profiling.enable=false",
                "global_profiler.tool=torch",
                f"global_profiler.steps={profiled}",
                "actor_rollout_ref.actor.profiler.enable=true",
                f"actor_rollout_ref.actor.profiler.tool_config.torch.contents={contents}",
            ],
            "ours": [
                "profiling=e2e",
                f"profiling.schedule.steps={profiled}",
                "+profiling.roles.rollout.enable=false",  # as verl does in this mode
                *flags,
            ],
        }
        for _ in range(pairs):
            for whose, given in settings.items():
                taken[whose] += run("pauses", PROFILED, *(text.replace(" ", "") for text in given))
        print(f"contents {name}: {PROFILED} profiled steps in each of {pairs} alternating runs")
        for whose, found in taken.items():
            stops = [step.pauses["stop"] for step in found]
            print(f"  {whose:5} step {ms(step.took_ns for step in found)}, pause at stop {ms(stops)}")
        ratios = [
            statistics.median(value(step) for step in taken["ours"])
            / statistics.median(value(step) for step in taken["verl"])
            for value in (lambda step: step.took_ns, lambda step: step.pauses["stop"])
        ]
        print(f"  ours / verl's: step {ratios[0]:.3f} (goal: 1), pause at stop {ratios[1]:.3f} (goal: 0.5)")


if __name__ == "__main__":
    part, *given = sys.argv[1:] or ["all"]
    count = int(given[0]) if given else 2
    if part in ("hooks", "all"):
        hooks()
    if part in ("steps", "all"):
        steps(count)
    if part in ("profilers", "all"):
        profilers(count)
