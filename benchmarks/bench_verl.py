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

from results import record, row

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "recipes.verl_grpo_cpu.cpu_platform"
PLUGIN = "verl_profiling.integrations.verl"
PROBE = "benchmarks.verl_probe"
WARM_UP = 4  # the first steps are slower
CODE = (
    "verl_profiling/integrations/verl.py",
    "verl_profiling/integrations/verl_trainer.py",
    "verl_profiling/integrations/verl_training_workers.py",
    "verl_profiling/integrations/verl_servers.py",
)
UNPROFILED, PROFILED = 24, 8
CONTENTS = {"CPU operators": "[cpu]", "with stacks, shapes and memory": "[cpu,stack,shapes,memory]"}


@dataclass
class Step:
    """One step of a run, as its trainer sees it."""

    begin_ns: int
    took_ns: int
    cpu_ns: int = 0
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
                elif kind == "cpu":
                    step.cpu_ns = took
                elif kind == "call":
                    step.calls += 1
    return steps[WARM_UP:]


def _begin(step: Step) -> int:
    return step.begin_ns


def hooks() -> None:
    """Record the hooks' own time on steps that are not profiled, and the calls made there."""
    found = run("hooks", UNPROFILED, "profiling=e2e", "profiling.schedule.steps=[2]")
    took = [step.took_ns / 1e6 for step in found]
    rows = [
        row("the step", took, "ms"),
        row(
            "all hooks' own time, in trainer, worker and server together",
            [step.own_ns / 1e6 for step in found],
            "ms",
            against="the step",
            of=took,
        ),
        row("remote calls by which a capture is driven (counted)", [sum(step.calls for step in found)], ""),
    ]
    method = (
        f"{len(found)} unprofiled steps of a whole run in which another step was profiled, by the clock, "
        "with what measuring adds."
    )
    record("verl_hooks", rows, method=method, code=CODE, peers={})
    for name in sorted(found[0].hooks):
        times = [time for step in found for time in step.hooks[name]]
        each = statistics.median(times) / 1000
        print(f"{name:28} {len(times) / len(found):5.1f} a step, {each:6.1f} us each")


def steps(pairs: int) -> None:
    """Record the steps of alternating runs with and without the plugin: clock and CPU time."""
    settings = {False: ["profiling.enable=false"], True: ["profiling=e2e", "profiling.schedule.steps=[2]"]}
    taken: dict[bool, list[list[Step]]] = {False: [], True: []}
    for _ in range(pairs):
        for plugin, given in settings.items():
            taken[plugin].append(run("steps", UNPROFILED, *given, plugin=plugin))
    rows = []
    for what, clock in (("took_ns", "by the clock"), ("cpu_ns", "CPU time of all processes")):
        without, with_plugin = (
            [statistics.median(getattr(step, what) for step in found) / 1e6 for found in taken[plugin]]
            for plugin in (False, True)
        )
        label = f"a step without the plugin, {clock}"
        rows += [
            row(label, without, "ms"),
            row(f"with it, {clock}", with_plugin, "ms", against=label, of=without),
        ]
    method = f"Medians of {UNPROFILED} unprofiled steps in each of {pairs} pairs of runs, alternating."
    record("verl_steps", rows, method=method, code=CODE, peers={})


def profilers(pairs: int) -> None:
    """Record profiled steps with this package and with verl's own torch profiler, same contents."""
    profiled = list(range(WARM_UP + 1, WARM_UP + PROFILED + 1))
    rows = []
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
        for what, value in (
            ("the step", lambda step: step.took_ns / 1e9),
            ("the pause at the stop", lambda step: step.pauses["stop"] / 1e9),
        ):
            theirs, ours = ([value(step) for step in taken[whose]] for whose in ("verl", "ours"))
            rows += [
                row(f"{name}, verl's profiler: {what}", theirs, "s"),
                row(f"{name}, this package: {what}", ours, "s", against="verl's profiler", of=theirs),
            ]
    setup = "`global_profiler.tool=torch`, discrete off, the same contents; without the rollout"
    record(
        "verl_profiled",
        rows,
        method=f"{PROFILED} profiled steps in each of {pairs} pairs of runs, alternating, by the clock.",
        code=CODE,
        peers={"verl's torch profiler": setup},
    )


if __name__ == "__main__":
    part, *given = sys.argv[1:] or ["all"]
    count = int(given[0]) if given else 2
    if part in ("hooks", "all"):
        hooks()
    if part in ("steps", "all"):
        steps(count)
    if part in ("profilers", "all"):
        profilers(count)
