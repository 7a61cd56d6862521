"""Prints the JSON schema of the document that a command prints with ``--json``.

Fields may be added in later versions, so validate with the schema of the installed one. A guide for
coding agents is ``docs/agents-guide.md``.

example: verl-profiling schema report
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from verl_profiling.commands import add_json, print_json
from verl_profiling.commands.plan import Plan
from verl_profiling.predict.prediction import Prediction
from verl_profiling.report.diff import Diff
from verl_profiling.report.model import Report
from verl_profiling.report.watch_frame import RunView
from verl_profiling.steps.check import CheckResult

_DOCUMENTS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "report": (Report, RunView),  # of a step, or of a run without captured steps
    "top": (RunView,),
    "what-if": (Prediction,),
    "diff": (Diff,),
    "check": (CheckResult,),
    "plan": (Plan,),
}
_TEXTS = {"what-if": ("title",), "diff": ("basis", "explained", "verdict")}
"""Texts that a command adds to its document."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("of", metavar="COMMAND", choices=_DOCUMENTS, help=", ".join(_DOCUMENTS))
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Print the schema."""
    schema = schema_of(arguments.of)
    if arguments.json:
        print_json(schema)
    else:
        print(json.dumps(schema, indent=2))
    return True


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON schema of the document of a command."""
    kinds = _DOCUMENTS[command]
    references, components = msgspec.json.schema_components(
        kinds, schema_hook=lambda kind: {"type": "string"}, ref_template="#/$defs/{name}"
    )
    properties = components[kinds[0].__name__]["properties"]
    for name in _TEXTS.get(command, ()):
        properties[name] = {"type": "string"}
    return {"anyOf": [*references], "$defs": components}
