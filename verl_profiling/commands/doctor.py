"""``verl-profiling doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.doctor import examine_config, examine_machine, load_config

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Prints what this machine has (packages, accelerators, engines, permissions) and which tools can "
        "record on it. With a configuration, also what that needs; exits 1 when it cannot run here."
    )
    parser.epilog = "example: verl-profiling doctor conf/ppo.yaml"
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help="settings, as YAML or JSON, or a run.json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine, and the configuration if there is one."""
    config = load_config(arguments.config) if arguments.config else None
    diagnoses = examine_machine()
    needs = examine_config(config) if config is not None else []
    runs = not any(diagnosis.problem for diagnosis in needs)
    if arguments.json:
        print(msgspec.json.encode({"machine": diagnoses, "config": needs}).decode())
    else:
        for diagnosis in (*diagnoses, *needs):
            mark = "!" if diagnosis.problem else " "
            print(f"{mark} {diagnosis.subject:<18}  {diagnosis.state}")
        if needs:
            print(f"{arguments.config}: {'can' if runs else 'cannot'} run here")
    return EXIT_OK if runs else EXIT_FINDING
