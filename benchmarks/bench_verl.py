"""What profiling costs a real verl run on CPU: unprofiled steps, profiled steps, and pauses.

Run with real verl (``make env-verl``), in parts if need be::

    .venv-verl/bin/python benchmarks/bench_verl.py hooks
    .venv-verl/bin/python benchmarks/bench_verl.py steps 3      # 3 pairs of runs
    .venv-verl/bin/python benchmarks/bench_verl.py profilers 3  # 3 runs in each mode

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from results import record, row

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "recipes.verl_grpo_cpu.cpu_platform"
PLUGIN = "verl_profiling.integrations.verl"
PROBE = "benchmarks.verl_probe"
WARM_UP = 4  # the first steps are slower
UNPROFILED, PROFILED = 24, 5
MODES = ("e2e", "discrete")
CONTENTS = "[cpu]"
ROLES = {  # by what names of files and folders begin with, verl's and this package's
    **{"agent_loop_rollout": "rollout", "rollout": "rollout"},
    **{"actor": "actor", "agent_loop": "agent_loop", "reward": "reward"},
}


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


@dataclass
class Written:
    """What the captures of a run left.

    Attributes:
        files: Files by captured step.
        bytes: Their bytes by captured step.
        roles: Roles that recorded.
    """

    files: float
    bytes: float
    roles: list[str]

    @classmethod
    def of(cls, folder: Path, steps: int) -> Written:
        """Count what is in a folder, the run's own file aside."""
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.json"]
        parts = {part for path in files for part in path.relative_to(folder).parts}
        found = (next(filter(part.startswith, ROLES), None) for part in parts)
        roles = {ROLES[prefix] for prefix in found if prefix is not None}
        return cls(
            len(files) / steps, sum(path.stat().st_size for path in files) / steps, sorted(roles)
        )


def run(
    measured: str,
    steps: int,
    *overrides: str,
    plugin: bool = True,
    folder: Path | None = None,
    verl_steps: Sequence[int] = (),
) -> list[Step]:
    """Run verl; return its steps without the first ones.

    Args:
        measured: What its probe measures.
        steps: Steps after the first ones.
        overrides: Settings of the run.
        plugin: Load this package.
        folder: Where this package and verl's profiler write: to ``ours`` and ``verl``.
        verl_steps: Steps that verl's profiler records beside those of this package.
    """
    with tempfile.TemporaryDirectory(prefix="verl-") as own:
        lines, recorded = Path(own) / "lines", folder or Path(own)
        lines.mkdir()
        command = [
            str(ROOT / "recipes/verl_grpo_cpu/run.sh"),
            f"trainer.total_training_steps={WARM_UP + steps}",
            "trainer.total_epochs=100",
            f"profiling.save_path={recorded}/ours",
            f"global_profiler.save_path={recorded}/verl",
            f"hydra.run.dir={own}",
            *overrides,
        ]
        loaded = [PLATFORM, *([PLUGIN] if plugin and measured != "hooks" else []), PROBE]
        variables = {
            **os.environ,
            "PYTHON": sys.executable,
            "RAY_TMPDIR": own,
            "PLUGINS": ",".join(loaded),
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "VERL_PROBE": str(lines),
            "VERL_PROBE_OF": measured,
            "VERL_PROBE_STEPS": ",".join(map(str, verl_steps)),
        }
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return steps_of([json.loads(line) for path in lines.iterdir() for line in path.open()])


def steps_of(lines: Iterable[tuple[str, str, int, int]]) -> list[Step]:
    """Return the steps with what happened in them."""
    lines = list(lines)
    steps = sorted(
        (Step(begin, took) for kind, _, begin, took in lines if kind == "step"), key=_begin
    )
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
        row(
            "remote calls by which a capture is driven (counted)",
            [sum(step.calls for step in found)],
            "",
        ),
    ]
    method = (
        f"{len(found)} unprofiled steps of a whole run in which another step was profiled, "
        "by the clock, "
        "with what measuring adds."
    )
    record("verl_hooks", rows, method=method, peers={})
    for name in sorted(found[0].hooks):
        times = [time for step in found for time in step.hooks[name]]
        each = statistics.median(times) / 1000
        print(f"{name:28} {len(times) / len(found):5.1f} a step, {each:6.1f} us each")


def steps(pairs: int) -> None:
    """Record the steps of alternating runs with and without the plugin: clock and CPU time."""
    settings = {
        False: ["profiling.enable=false"],
        True: ["profiling=e2e", "profiling.schedule.steps=[2]"],
    }
    taken: dict[bool, list[list[Step]]] = {False: [], True: []}
    for _ in range(pairs):
        for plugin, given in settings.items():
            taken[plugin].append(run("steps", UNPROFILED, *given, plugin=plugin))
    rows = []
    for what, clock in (("took_ns", "by the clock"), ("cpu_ns", "CPU time of all processes")):
        without, with_plugin = (
            [
                statistics.median(getattr(step, what) for step in found) / 1e6
                for found in taken[plugin]
            ]
            for plugin in (False, True)
        )
        label = f"a step without the plugin, {clock}"
        rows += [
            row(label, without, "ms"),
            row(f"a step with the plugin, {clock}", with_plugin, "ms", against=label, of=without),
        ]
    method = (
        f"Medians of {UNPROFILED} unprofiled steps in each of {pairs} pairs of runs, alternating."
    )
    record("verl_steps", rows, method=method, peers={})


@dataclass
class Measured:
    """The steps of one side, and what their captures left: one value for each step, or run."""

    steps: list[Step] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)

    def of(self) -> dict[str, tuple[list[float], str]]:
        """Return the numbers of the table, with their units."""
        return {
            "step and pauses": ([step.took_ns / 1e9 for step in self.steps], "s"),
            "of it the pauses": ([sum(step.pauses.values()) / 1e9 for step in self.steps], "s"),
            "files of a step": ([one.files for one in self.written], ""),
            "bytes of a step": ([one.bytes / 1e6 for one in self.written], "MB"),
        }


def profilers(runs: int) -> None:
    """Record profiled steps with this package and with verl's own torch profiler, same contents.

    Both take turns in one run, with a step between that nobody records. The table is written after
    each run of both modes.
    """
    found = {mode: {whose: Measured() for whose in ("verl", "ours", "nobody")} for mode in MODES}
    for number in range(runs):
        for mode, sides in found.items():
            take_turns(mode, sides)
        record_profilers(found, number + 1)


def take_turns(mode: str, sides: dict[str, Measured]) -> None:
    """Run verl once; add the steps that verl's profiler recorded, those that this package did,
    and others.
    """
    theirs = range(WARM_UP + 1, WARM_UP + 3 * PROFILED + 1, 3)
    torch = "actor_rollout_ref.actor.profiler.tool_config.torch"
    settings = [
        f"profiling={mode}",
        f"profiling.schedule.steps=[{','.join(str(step + 1) for step in theirs)}]",
        "global_profiler.tool=torch",
        "actor_rollout_ref.actor.profiler.enable=true",
        f"{torch}.contents={CONTENTS}",
        f"{torch}.discrete={mode == 'discrete'}",
    ]
    with tempfile.TemporaryDirectory(prefix=f"{mode}-") as folder:
        found = run("turns", 3 * PROFILED, *settings, folder=Path(folder), verl_steps=theirs)
        for first, (whose, side) in enumerate(sides.items()):
            side.steps += found[first::3]
            side.written.append(Written.of(Path(folder) / whose, PROFILED))


def record_profilers(found: dict[str, dict[str, Measured]], runs: int) -> None:
    """Record what was measured so far."""
    rows = []
    for mode, sides in found.items():
        theirs, ours = (
            f"{mode}, {who} ({', '.join(sides[whose].written[0].roles)})"
            for whose, who in (("verl", "verl's profiler"), ("ours", "this package"))
        )
        of_verl = sides["verl"].of()
        alone, _ = sides["nobody"].of()["step and pauses"]
        rows.append(row(f"{mode}, a step that nobody records", alone, "s"))
        added = {
            whose: [step - of_nobody for step, of_nobody in zip(steps, alone, strict=True)]
            for whose in ("verl", "ours")
            for steps, _ in [sides[whose].of()["step and pauses"]]
        }
        for what, (values, unit) in sides["ours"].of().items():
            known = of_verl[what][0]
            rows += [
                row(f"{theirs}: {what}", known, unit),
                row(f"{ours}: {what}", values, unit, against="verl's profiler", of=known),
            ]
        rows += [
            row(f"{theirs}: added to a step that nobody records", added["verl"], "s"),
            row(
                f"{ours}: added to it",
                added["ours"],
                "s",
                against="verl's profiler",
                of=added["verl"],
            ),
        ]
    setup = (
        "`global_profiler.tool=torch`, the same contents: operators of the CPU; in e2e mode "
        "(`discrete` off) "
        "verl does not record the rollout, this package does"
    )
    record(
        "verl_profiled",
        rows,
        method=f"{PROFILED} profiled steps of each, in turn, in each of {runs} runs for each "
        "mode, by the "
        "clock; other work ran on the two cores.",
        peers={"verl's torch profiler": setup},
    )


if __name__ == "__main__":
    part, *given = sys.argv[1:] or ["all"]
    count = int(given[0]) if given else 3
    if part in ("hooks", "all"):
        hooks()
    if part in ("steps", "all"):
        steps(count)
    if part in ("profilers", "all"):
        profilers(count)
