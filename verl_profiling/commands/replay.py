"""Sends the requests of a captured step to an engine again, without the trainer.

Prompts have the recorded lengths and shared blocks, and random tokens; responses have the recorded
lengths. A turn of a trajectory waits for the turn before it, and as long as its tools took. The
replay is a capture, which report, diff and what-if read. The last line is the step with the
replayed rollout.

example: verl-profiling replay outputs/run/step_000012 --engine vllm --set model=MODEL
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_profiling.analysis import CapturedStep, open_step
from verl_profiling.commands.common import add_json, count, local_path, option, show
from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.predict.prediction import Prediction
from verl_profiling.steps.load import Load, load_of
from verl_profiling.units import duration, visible


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", type=local_path, metavar="STEP", help="folder of a captured step")
    option(parser, "--engine NAME", "vllm, sglang, or the URL of a server", required=True)
    option(
        parser,
        "--set OPTION=VALUE",
        "option of the engine, as its constructor calls it; repeatable",
        lambda text: [_assignment(text)],
        many=True,
    )
    option(parser, "--replicas N", "number of engines; sessions take turns", count, default=1)
    option(parser, "--times N", "how often to send the load", count, default=1)
    parser.add_argument(
        "--arrivals", action="store_true", help="begin each session at its recorded time"
    )
    option(parser, "--output FOLDER", "run folder of the replay", default="outputs/replay")
    add_json(parser)


def _assignment(text: str) -> tuple[str, Any]:
    """Return the name and the value of ``name=value``; a value is JSON, else text."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not OPTION=VALUE")
    with suppress(json.JSONDecodeError):
        return name, json.loads(value)
    return name, value


def run(arguments: argparse.Namespace) -> bool:
    """Send the load, and compare it with the captured rollout; return whether nothing is missing.

    Raises:
        TraceFormatError: The step has no request that can be replayed.
    """
    from verl_profiling.integrations.replay import replay, servers_of

    step = open_step(arguments.path)
    load = load_of_step(step)
    options = dict(arguments.set or ())
    profiling = {
        "enable": True,
        "strict": True,
        "tool": "spans",
        "save_path": arguments.output,
        "job": options,
    }
    servers = servers_of(arguments.engine, profiling, options, arguments.replicas)
    try:
        folders = asyncio.run(
            replay(
                load,
                servers,
                profiling,
                step=step.step or 1,
                times=arguments.times,
                at_arrivals=arguments.arrivals,
            )
        )
    finally:
        for server in servers:
            server.close()
    for problem in load.problems:
        print(f"verl-profiling: {visible(problem)}", file=sys.stderr)
    for folder in folders:
        _show(arguments, step, seconds_of(load), folder, load_of_step(open_step(folder)))
    return not load.problems


def seconds_of(load: Load) -> float:
    """Return the time from the first request's begin to the last one's end (s)."""
    requests = [row.request for row in load.requests]
    return (max(one.end_ns for one in requests) - min(one.begin_ns for one in requests)) / 1e9


def _show(
    arguments: argparse.Namespace,
    step: CapturedStep,
    captured_s: float,
    folder: Path,
    replayed: Load,
) -> None:
    """Print a replay, and the step with its rollout."""
    replayed_s = seconds_of(replayed)
    document = {
        "directory": folder,
        "requests": len(replayed.requests),
        "captured_s": captured_s,
        "replayed_s": replayed_s,
    }
    times = f"{duration(replayed_s)}, captured: {duration(captured_s)}"
    lines = [f"{folder}: {len(replayed.requests):,} requests in {times}"]
    try:
        prediction = with_rollout(step, replayed_s - captured_s)
    except ConfigError as error:
        lines.append(f"the step with this rollout is unknown: {error}")
    else:
        document["recorded_us"] = prediction.span_us
        document["predicted_us"] = prediction.predicted_us
        before, after = duration(prediction.span_us / 1e6), duration(prediction.predicted_us / 1e6)
        lines.append(f"the step with this rollout: {after}, recorded: {before}")
    show(arguments, document, lines)


def with_rollout(step: CapturedStep, more_s: float) -> Prediction:
    """Return the step if its engines take longer.

    Args:
        step: The step.
        more_s: How much longer the requests take (s).

    Raises:
        ConfigError: The step has no rollout, or it would take no time.
    """
    assert step.manifest is not None  # load_of_step
    spans = [span for span in step.manifest.stages if span.name == ROLLOUT]
    rollout_s = sum(span.end_ns - span.begin_ns for span in spans) / 1e9
    if not rollout_s or rollout_s + more_s <= 0:
        raise ConfigError(ROLLOUT, "its requests did not run in a stage of this name")
    return step.what_if(scale={ROLLOUT: (rollout_s + more_s) / rollout_s})


def load_of_step(step: CapturedStep) -> Load:
    """Return the load of a captured step.

    Raises:
        TraceFormatError: The step has no manifest, or no request that can be replayed.
    """
    if step.manifest is None:
        raise TraceFormatError(step.directory, "has no manifest, so its requests are unknown")
    load = load_of(step.manifest, step.inputs)
    if not load.requests:
        reason = load.said_left_out or "set rollout.requests, and give the engine to its mixin"
        raise TraceFormatError(step.directory, f"has no request that can be replayed: {reason}")
    return load
