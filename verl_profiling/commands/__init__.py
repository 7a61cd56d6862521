"""The subcommands of ``verl-profiling``: their list, and one module each.

A new command is a line of :data:`COMMANDS`, and a module of its name. The help of a command is the
docstring of its module; the last paragraph is an example. The module has ``configure(parser)``,
which adds the options, and ``run(arguments)``, which runs the command and returns whether all is
well (exit code 0, else 1). It may have ``DOCUMENTS``, the types of what ``--json`` prints, and
``TEXTS``, the names of texts beside their fields. A module is imported only when its command is
used, so that ``--help`` is quick and ``merge`` loads no numerical library. Options and output that
commands have in common are in :mod:`verl_profiling.commands.common`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = {
    "demo": "train a tiny policy here, capture a step, and show its report",
    "merge": "write one timeline of a step, to open in Perfetto",
    "report": "show the use of a step's time: stages, workers, idle time by cause",
    "view": "open the page of a run, or a step's timeline and report, in the browser",
    "top": "show a running job, live: steps, stages, slow processes, captures so far",
    "diff": "compare two steps or runs, or several runs a side",
    "what-if": "show the critical path of a step, and predict the step after changes",
    "replay": "send the requests of a captured step to an engine again, without the trainer",
    "collect": "fetch reports that Nsight Systems finished after the run",
    "export": "send a step to an OpenTelemetry endpoint, or its requests to a file",
    "check": "verify that every expected artifact exists and is complete",
    "plan": "print what a configuration would capture, and in how many files",
    "trigger": "request a capture of the next step of a running job",
    "schema": "print the JSON schema of a command's document",
    "doctor": "show the tools that work on this machine",
}
"""Purpose of each command, in the order of ``--help``."""

BETWEEN_SIDES = Path("\0")
"""The argument ``--`` of ``diff``, which argparse would drop; no file has this name."""

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_BAD_INPUT = 2


def module_of(command: str) -> Any:
    """Return the module of a command."""
    return import_module(f"verl_profiling.commands.{command.replace('-', '_')}")
