"""Trains a tiny policy with GRPO in this process, and shows the report of a captured step.

Rollout, backward, optimizer and weight update are real. It takes less than a minute on two CPU
cores, needs torch, and downloads nothing. The run is in outputs/grpo_demo.

example: verl-profiling demo
"""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from contextlib import redirect_stdout

from verl_profiling.commands import report
from verl_profiling.commands.common import add_json
from verl_profiling.files.process_marks import note_import
from verl_profiling.tools.base import imported

_STEPS = 24
_CAPTURED = 20
"""The captured step: by then, most answers are right, and the watch knows usual durations."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Train, print the report, and open its page where there is a display."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch prints when its profiler starts
    imported("torch", "torch", "torch")
    from verl_profiling.integrations.tiny_grpo import GRPOLoop, PolicyServer, PolicyWorker

    note_import()  # so that the start-up of the run tells torch's import from unknown time
    settings = {
        "enable": True,
        "strict": True,
        "schedule": {"steps": [_CAPTURED]},
        "watch": {"enable": True},
        "save_path": "outputs/grpo_demo",
    }
    loop = GRPOLoop(settings, [PolicyWorker(settings)], [PolicyServer(settings)])
    with redirect_stdout(sys.stderr):
        loop.train(_STEPS)
    step = loop.profiling.last_folder
    assert step is not None  # strict
    words = [str(step.parent), "--save"]
    if arguments.json:
        words.append("--json")
    reader = argparse.ArgumentParser()
    report.configure(reader)
    is_well = report.run(reader.parse_args(words))
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open((step / "report.html").absolute().as_uri())
    print(f"its timeline, in your browser: verl-profiling view {step}", file=sys.stderr)
    return is_well
