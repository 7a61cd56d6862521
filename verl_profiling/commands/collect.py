"""``verl-profiling collect``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.commands.arguments import local_path
from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.timeline.collect import Collected, collect
from verl_profiling.timeline.gather import Elsewhere, Nodes, artifacts_elsewhere, fetch
from verl_profiling.visible import visible

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Brings into the step folders what could not be written there. Artifacts that hosts have on file "
        "systems of their own are fetched through Ray and verified; run it where the cluster can be reached. "
        "The reports of the nsys tool are moved, and entered into the manifests: exported reports (.sqlite) "
        "become traces, which merge and report read. Exits 1 when something is missing: Nsight Systems "
        "writes the last reports when the worker's process ends."
    )
    parser.epilog = "example: verl-profiling collect outputs/run --export && verl-profiling merge outputs/run"
    parser.add_argument("path", type=local_path, metavar="PATH", help="run folder, or a step folder of it")
    parser.add_argument("--export", action="store_true", help="export each report first (needs nsys)")
    parser.add_argument(
        "--address", default="auto", help="the Ray cluster; by default the one that this host is part of"
    )


def run(arguments: argparse.Namespace) -> int:
    """Collect what is finished."""
    path: Path = arguments.path
    if not path.is_dir():
        raise TraceFormatError(path, "no such folder")
    collected: list[Collected] = []

    def torn(manifest: Path, problem: str) -> None:
        name = f"{manifest.parent.name}/{manifest.name}"
        collected.append(Collected(path=name, fate="damaged", reason=problem))

    elsewhere = artifacts_elsewhere(path, torn)
    collected += _gathered(elsewhere, arguments.address)
    try:
        collected += collect(path, export=arguments.export)
    except TraceFormatError:  # nothing was recorded with nsys
        if not elsewhere:
            raise
    for entry in collected:
        reason = f"  {entry.reason}" if entry.reason else ""
        print(visible(f"{entry.fate:<10}  {entry.path}{reason}"))
    return EXIT_OK if all(entry.fate == "ok" for entry in collected) else EXIT_FINDING


def _gathered(elsewhere: list[Elsewhere], address: str) -> Iterator[Collected]:
    """Fetch what is on other hosts; without Ray, say where it is."""
    if not elsewhere:
        return
    try:
        nodes = Nodes(address)
    except ToolUnavailableError as error:
        places = "".join(f"\n  {wanted.host}:{wanted.path} -> {wanted.folder}" for wanted in elsewhere)
        raise ToolUnavailableError(f"{error}; or copy by hand:{places}") from error
    for wanted in elsewhere:
        try:
            problem = fetch(nodes, wanted)
        except (OSError, TraceFormatError) as error:
            problem = str(error)
        yield Collected(path=wanted.name, fate="missing" if problem else "ok", reason=problem)
