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

from verl_profiling.cli import COMMANDS, module_of
from verl_profiling.commands.common import add_json, print_json
from verl_profiling.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    help = "a command whose document has a schema, e.g. report"
    parser.add_argument("of", metavar="COMMAND", choices=COMMANDS, help=help)
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
    """Return the JSON schema of the document of a command.

    Raises:
        ConfigError: The document has no schema.
    """
    module = module_of(command)
    if not hasattr(module, "DOCUMENTS"):
        others = [name for name in COMMANDS if hasattr(module_of(name), "DOCUMENTS")]
        raise ConfigError(command, f"has no schema; the commands with one: {', '.join(others)}")
    references, components = msgspec.json.schema_components(
        module.DOCUMENTS,
        schema_hook=lambda kind: {"type": "string"},
        ref_template="#/$defs/{name}",
    )
    properties = components[module.DOCUMENTS[0].__name__]["properties"]
    for name in getattr(module, "TEXTS", ()):
        properties[name] = {"type": "string"}
    return {"anyOf": [*references], "$defs": components}
