"""Predictions held against real runs: captures A, predicts B from A alone, runs B, and prints the
errors.

Run: ``make what-if-judge``. Each run has five captured steps. The runs of sleeping loops are
programs of their own, ``what_if_loop.py``; those of a recipe follow each other in one program,
``what_if_recipes.py`` or ``what_if_verl.py``.
A prediction is the median of the predictions from the steps of A. A spread is that of the steps of
one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import ray
import results

from verl_profiling.analysis import CapturedStep, open_run

__all__ = ["LOOPS", "PAIRS", "all_pairs", "markdown"]

HERE = Path(__file__).parent
RESULTS = HERE / "what_if_judge.json"
LIMIT_S = 1800


@dataclass(frozen=True)
class Pair:
    """Two runs that differ by one change.

    Attributes:
        change: Arguments of ``CapturedStep.what_if``.
        before: Plan of run A, where it differs from the loop's.
        after: Plan of run B, where it differs from run A's.
    """

    change: dict[str, Any]
    after: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loop:
    """A loop of Ray actors that sleep, or a recipe.

    Attributes:
        plan: Plan of all its runs.
        recipe: The recipe.
        settings: Overrides of the recipe's configuration.
        environment: Environment with the recipe's engine.
        program: The program that runs the recipe.
    """

    plan: dict[str, Any]
    recipe: str = ""
    settings: tuple[str, ...] = ()
    environment: str = ".venv"
    program: str = "what_if_recipes.py"


def scale(**factors: float) -> dict[str, Any]:
    """Return the change of stages."""
    return {"scale": factors}


def tool(name: str, time: float | str) -> dict[str, Any]:
    """Return the change of a tool: a time (s), or a factor such as ``0.5x``."""
    return {"tools": {name: time}}


GENERATE_S = [0.1, 0.12, 0.15, 0.18, 0.2, 0.25, 0.3, 0.6]
TORCH = (
    "actor.lr=0",
    "profiling.watch.enable=false",
    "model.hidden_size=128",
    "model.num_hidden_layers=4",
)
GRPO = (*TORCH, "profiling.tool=spans")
AGENT = (*TORCH[:2], GRPO[-1], "batch.prompts=3", "agent.turns=2", "agent.processes=1")
MENDED = (*AGENT, "agent.sandbox_blocks=false")
VERL = ("profiling.tool=spans", "profiling.watch.enable=false")
POLLS = "polling the replay buffer"
VLLM = ("rollout.engine=vllm", "rollout.replicas=1")

LOOPS = {
    "engines": Loop({"engines_s": [0.9, 0.5], "ranks_s": [0.4, 0.8], "reward_s": 0.2}),
    "agents": Loop({"generate_s": GENERATE_S, "tool_s": 0.2, "ranks_s": [0.5, 0.5]}),
    "queues": Loop({"generate_s": [0.1, 0.12, 0.14, 0.16] * 2, "tool_s": 0.2, "slots": 1}),
    "limit": Loop({"generate_s": GENERATE_S, "tool_s": 0.2, "limit": 3}),
    "service": Loop({"generate_s": GENERATE_S, "tool_s": 0.15, "serial": True}),
    "agents beside": Loop(
        {"generate_s": GENERATE_S, "tool_s": 0.4, "ranks_s": [0.5, 0.5], "beside": True}
    ),
    "beside": Loop({"engines_s": [1.4, 1.2], "ranks_s": [0.5, 0.5], "beside": True}),
    "grpo_tiny": Loop({}, "grpo_tiny", GRPO),
    "grpo_tiny, torch": Loop({}, "grpo_tiny", (*TORCH, "batch.prompts=16")),
    "grpo_tiny, vLLM": Loop({}, "grpo_tiny", (*GRPO, *VLLM), ".venv-vllm"),
    "agent_tiny": Loop({"sandbox_s": 0.06}, "agent_tiny", AGENT),
    "agent_tiny, mended": Loop({"sandbox_s": 0.2}, "agent_tiny", MENDED),
    "agent_tiny, vLLM": Loop({"sandbox_s": 0.2}, "agent_tiny", (*MENDED, *VLLM), ".venv-vllm"),
    "verl": Loop({}, "verl_grpo_cpu", VERL, ".venv-verl", "what_if_verl.py"),
}
EVEN: dict[str, Any] = {"balance": ["rollout"]}
OF_TOOLS = (
    Pair({}),
    Pair(tool("sandbox", 0.4), {"sandbox_s": 0.4}),
    Pair(tool("sandbox", 0.1), {"sandbox_s": 0.1}),
    Pair(tool("search", 0.3), {"agent": {"search_s": 0.3}}),
    Pair(scale(update_actor=3.0), {"epochs": 3}),
    Pair({"no_tail": 75.0}, {"done": 0.75}),
)
PAIRS = {
    "engines": (
        Pair({}),
        Pair(scale(update_actor=0.5), {"ranks_s": [0.2, 0.4]}),
        Pair(scale(rollout=0.5), {"engines_s": [0.45, 0.25]}),
        Pair(scale(reward=2.0), {"reward_s": 0.4}),
        Pair({"balance": ["update_actor"]}, {"ranks_s": [0.6, 0.6]}),
        Pair(EVEN, {"engines_s": [0.7, 0.7]}),
        Pair(EVEN | scale(update_actor=1.5), {"engines_s": [0.7, 0.7], "ranks_s": [0.6, 1.2]}),
    ),
    "agents": (
        Pair({}),
        Pair(tool("search", 0.05), {"tool_s": 0.05}),
        Pair(tool("search", 0.4), {"tool_s": 0.4}),
        Pair({"no_tail": 87.5}, {"done": 0.875}),
        Pair({"no_tail": 50.0}, {"done": 0.5}),
        Pair({"no_tail": 75.0} | tool("search", 0.1), {"done": 0.75, "tool_s": 0.1}),
    ),
    "queues": (
        Pair(tool("search", 0.05), {"tool_s": 0.05}),
        Pair(tool("search", 0.5), {"tool_s": 0.5}),
        Pair({"no_tail": 50.0}, {"done": 0.5}),
    ),
    "limit": (
        Pair({}),
        Pair(tool("search", 0.05), {"tool_s": 0.05}),
        Pair(tool("search", "0.5x"), {"tool_s": 0.1}),
        Pair(tool("search", "2x"), {"tool_s": 0.4}),
    ),
    "service": (
        Pair(tool("search", 0.05), {"tool_s": 0.05}),
        Pair(tool("search", "0.5x"), {"tool_s": 0.075}),
        Pair(tool("search", "2x"), {"tool_s": 0.3}),
    ),
    "agents beside": (
        Pair({}),
        Pair(tool("search", "0.5x"), {"tool_s": 0.2}),
        Pair(scale(update_actor=0.5), {"ranks_s": [0.25, 0.25]}),
    ),
    "beside": (
        Pair({}),
        Pair(scale(update_actor=0.5), {"ranks_s": [0.25, 0.25]}),
        Pair(scale(rollout=0.5), {"engines_s": [0.7, 0.6]}),
    ),
    "grpo_tiny": (
        Pair({}),
        Pair(scale(update_actor=2.0), {"epochs": 2}),
        Pair(scale(update_actor=3.0), {"epochs": 3}),
        Pair(scale(update_actor=0.5), {"epochs": 1}, {"epochs": 2}),
        Pair(scale(rollout=2.0), {"generate": [2, 2]}),
        Pair(scale(rollout=4.0), {"generate": [4, 4]}),
        Pair(scale(rollout=0.5), {"generate": [1, 1]}, {"generate": [2, 2]}),
        Pair(EVEN, {"generate": [2, 2]}, {"generate": [3, 1]}),
        Pair(EVEN, {"generate": [3, 3]}, {"generate": [1, 5]}),
        Pair(scale(update_actor=2.0, rollout=2.0), {"epochs": 2, "generate": [2, 2]}),
        Pair(
            EVEN | scale(update_actor=2.0), {"epochs": 2, "generate": [2, 2]}, {"generate": [3, 1]}
        ),
    ),
    "grpo_tiny, torch": (
        Pair({}),
        Pair(scale(update_actor=2.0), {"epochs": 2}),
        Pair(scale(rollout=0.5), {"generate": [1, 1]}, {"generate": [2, 2]}),
        Pair({"balance": ["update_actor"]}, {"rows": [2, 2]}, {"rows": [3, 1]}),
        Pair({"balance": ["update_actor"]}, {"rows": [3, 3]}, {"rows": [1, 5]}),
    ),
    "grpo_tiny, vLLM": (
        Pair({}),
        Pair(scale(rollout=2.0), {"generate": [2]}, {"generate": [1]}),
        Pair(scale(rollout=4.0), {"generate": [4]}, {"generate": [1]}),
        Pair(scale(rollout=0.25), {"generate": [1]}, {"generate": [4]}),
        Pair(scale(update_actor=2.0), {"epochs": 2}),
        Pair(scale(update_actor=0.5), {"epochs": 1}, {"epochs": 2}),
    ),
    "agent_tiny": (
        Pair({}),
        Pair(tool("sandbox", 0.12), {"sandbox_s": 0.12}),
        Pair(tool("sandbox", 0.06), {"sandbox_s": 0.06}, {"sandbox_s": 0.15}),
        *OF_TOOLS[3:],
    ),
    "agent_tiny, mended": (*OF_TOOLS, Pair({"no_tail": 50.0}, {"done": 0.5})),
    "agent_tiny, vLLM": OF_TOOLS,
    "verl": (
        Pair({}),
        Pair(tool("reward", 0.1), {"reward_s": 0.1}),
        Pair(tool("reward", 1.0), {"reward_s": 1.0}),
        Pair(tool("search", 0.1), {"tool_s": 0.1}),
        Pair(tool("search", 1.5), {"tool_s": 1.5}),
        Pair(scale(update_actor=2.0), {"epochs": 4}),
        Pair(scale(update_actor=0.5), {"epochs": 2}, {"epochs": 4}),
        Pair({}, before={"poll_s": 2.0}),
        Pair(tool("search", 1.5), {"tool_s": 1.5}, {"poll_s": 2.0}),
        Pair(tool("search", 0.1), {"tool_s": 0.1}, {"poll_s": 2.0, "tool_s": 1.5}),
        Pair({"scale": {POLLS: 0.05}}, {"poll_s": 0.1}, {"poll_s": 2.0}),
    ),
}


def call(command: list[str]) -> None:
    """Run a program.

    Raises:
        RuntimeError: The program has failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")


def run(loop: Loop, plans: list[dict[str, Any]], folder: Path) -> list[list[CapturedStep]]:
    """Run the plans of a loop; return the captured steps of each.

    Raises:
        RuntimeError: The loop has failed.
    """
    python = str(results.ROOT / loop.environment / "bin/python")
    if loop.recipe:
        settings = json.dumps(loop.settings)
        commands = [
            [
                python,
                str(HERE / loop.program),
                str(folder),
                loop.recipe,
                settings,
                json.dumps(plans),
            ]
        ]
    else:
        program = str(HERE / "what_if_loop.py")
        commands = [
            [python, program, str(folder / str(at)), json.dumps(one)]
            for at, one in enumerate(plans)
        ]

    with ThreadPoolExecutor(2) as pool:  # a sleeping loop leaves room for another one
        list(pool.map(call, commands))
    return [open_run(folder / str(at)).steps() for at in range(len(plans))]


def row(
    loop: str, pair: Pair, before: list[CapturedStep], after: list[CapturedStep]
) -> dict[str, Any]:
    """Return the prediction from the steps of A, beside the steps of B."""
    found = [step.what_if(**pair.change) for step in before]
    replayed = [step.what_if() for step in before]
    spans_s = [step.what_if().span_us / 1e6 for step in after]
    return {
        "loop": loop,
        "change": " ".join(found[0].changes) or "none",
        "recorded_s": statistics.median(one.span_us for one in found) / 1e6,
        "predicted_s": statistics.median(one.predicted_us for one in found) / 1e6,
        "truth_s": statistics.median(spans_s),
        "spread_s": max(spans_s) - min(spans_s),
        "recorded_spread_s": (max(one.span_us for one in found) - min(one.span_us for one in found))
        / 1e6,
        "replay_error": max(abs(one.predicted_us / one.span_us - 1) for one in replayed),
    }


def error(row: dict[str, Any]) -> float:
    """Return the error of a prediction, as a share of the true step."""
    return float(row["predicted_s"] / row["truth_s"] - 1)


def spread(row: dict[str, Any], run: str) -> str:
    """Return the spread of the steps of a run around their middle."""
    key = "recorded_spread_s" if run == "recorded" else "spread_s"
    return f"±{row[key] / 2 / row[f'{run}_s']:.1%}"


def is_wrong_way(row: dict[str, Any]) -> bool:
    """Return whether a step changed against the prediction,
    by more than the spread of both runs.
    """
    truth, predicted = (row[key] - row["recorded_s"] for key in ("truth_s", "predicted_s"))
    noise = max(row["spread_s"], row["recorded_spread_s"])
    return bool(row["change"] != "none" and abs(truth) > noise and truth * predicted <= 0)


def is_miss(row: dict[str, Any]) -> bool:
    """Return whether the prediction is outside of the spread of both runs around the step of B."""
    return bool(
        abs(row["predicted_s"] - row["truth_s"])
        > max(row["spread_s"], row["recorded_spread_s"]) / 2
    )


def group(row: dict[str, Any]) -> tuple[str, str]:
    """Return the kinds of the run and of the change."""
    options = {f"`{option}`" for option in re.findall("--[a-z-]+", row["change"])} or {"none"}
    run = "recipes" if LOOPS[row["loop"]].recipe else "loops that sleep"
    return "verl" if row["loop"] == "verl" else run, "several" if len(
        options
    ) > 1 else options.pop()


def all_pairs(found: dict[str, Any]) -> str:
    """Return the table of all pairs, and where they were measured."""
    lines = [
        "| loop | change | step of A | predicted | step of B | error | spread of A | spread of B |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found["rows"]:
        cells = [f"{one[key]:.3f} s" for key in ("recorded_s", "predicted_s", "truth_s")]
        cells += [f"{error(one):+.1%}", spread(one, "recorded"), spread(one, "truth")]
        lines.append(f"| {one['loop']} | `{one['change']}` | {' | '.join(cells)} |")
    places = defaultdict[str, list[str]](list)
    for loop, measured in found["measured"].items():
        places[results.where(measured)].append(loop)
    first, *others = sorted(places, key=lambda where: -len(places[where]))
    more = (f"{', '.join(places[where])}: {where}." for where in others)
    return "\n".join([*lines, "", f"{first}.", *more])


def markdown(found: dict[str, Any]) -> str:
    """Return the errors by kind of run and change, and the misses."""
    lines = [
        "| runs | change | pairs | median error | 90% of errors | misses | wrong direction "
        "| spread of B |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kinds, pairs in groupby(sorted(found["rows"], key=group), group):
        chosen = list(pairs)
        errors = sorted(abs(error(one)) for one in chosen)
        shares = f"{statistics.median(errors):.1%} | {errors[math.ceil(0.9 * len(errors)) - 1]:.1%}"
        counts = f"{sum(map(is_miss, chosen))} | {sum(map(is_wrong_way, chosen))}"
        middle = statistics.median(one["spread_s"] / one["truth_s"] / 2 for one in chosen)
        lines.append(
            f"| {' | '.join(kinds)} | {len(chosen)} | {shares} | {counts} | ±{middle:.1%} |"
        )
    missed = filter(is_miss, found["rows"])
    misses = (f"- {one['loop']}: `{one['change']}` {error(one):+.1%}" for one in missed)
    replayed = max((one["replay_error"] for one in found["rows"]), default=0.0)
    replay = (
        f"The replay of a step without a change differs from the step by at most {replayed:.2%}."
    )
    return "\n".join([*lines, "", f"{replay} Misses:", "", *misses])


def main() -> None:
    """Run the pairs that are asked for, and print the table;
    all of them are kept as the results.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument(
        "--loops",
        nargs="*",
        default=list(LOOPS),
        choices=LOOPS,
        help="only these; rows of others stay",
    )
    parser.add_argument(
        "--change", default="", help="only changes that this pattern matches; keeps no results"
    )
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    given = parser.parse_args()
    if not all(LOOPS[name].recipe for name in given.loops):
        ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    found: dict[str, Any] = {"measured": {}, "rows": []}
    if not given.change and RESULTS.exists():
        found = json.loads(RESULTS.read_text())
        found["rows"] = [one for one in found["rows"] if one["loop"] not in given.loops]
    with tempfile.TemporaryDirectory(prefix="what-if-judge-") as folder:
        for name in given.loops:
            loop = LOOPS[name]
            pairs = [pair for pair in PAIRS[name] if re.search(given.change, str(pair.change))]
            plans = [
                {**loop.plan, **pair.before, **more} for pair in pairs for more in ({}, pair.after)
            ]
            found["measured"][name] = results.here()
            runs = run(loop, plans, (given.keep or Path(folder)) / name.replace(", ", "_"))
            for pair, before, after in zip(pairs, runs[::2], runs[1::2], strict=True):
                found["rows"].append(row(name, pair, before, after))
                print(found["rows"][-1], file=sys.stderr, flush=True)
            if not given.change:
                results.write(RESULTS, found)
    print(all_pairs(found), markdown(found), sep="\n\n")


if __name__ == "__main__":
    main()
