"""The file that ``watch_faults.py`` writes, ``watch_faults.json``, and the table that a page shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "markdown", "where"]

RESULTS = Path(__file__).with_name("watch_faults.json")


def markdown(results: dict[str, Any]) -> str:
    """Return the table of all runs by fault, what they come to, and where they ran."""
    lines = [
        "| fault | loop | runs | noticed | after steps | sign | stage right | rank in first two | captured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    faulty = [run for run in results["runs"] if run["noticeable"]]
    for fault, loop in dict.fromkeys((run["fault"], run["loop"]) for run in faulty):
        runs = [run for run in faulty if (run["fault"], run["loop"]) == (fault, loop)]
        found = [run for run in runs if run["after"] is not None]
        after = sorted({run["after"] for run in found})
        span = f"{after[0]} to {after[-1]}" if len(after) > 1 else "".join(map(str, after))
        signs = ", ".join(f"`{sign}`" for sign in dict.fromkeys(run["sign"] for run in found))
        lines.append(
            f"| {fault} | {loop} | {len(runs)} | {len(found)} | {span} | {signs} "
            f"| {_share(run['stage_right'] for run in found)} | {_share(run['rank_right'] for run in found)} "
            f"| {_share(run['captured'] for run in found)} |"
        )
    quiet = sum(run["quiet_steps"] for run in results["runs"])
    false = sum(run["false_alarms"] for run in results["runs"])
    soon = [run for run in faulty if run["after"] is not None and run["after"] <= run["allowed"]]
    lines += [
        "",
        f"{len(faulty)} runs with a fault, {len(soon)} of them noticed in time "
        f"({len(soon) / max(1, len(faulty)):.0%}): within 5 steps; where memory grows, within 5 after the "
        "window. "
        f"{quiet:,} quiet steps, of all runs before their fault and of those without one, "
        f"with {false} false alarms: {1000 * false / max(1, quiet):.2f} per 1,000.",
        "",
        *(
            f"- Missed: {run['fault']}, {run['loop']}: {run['miss']}"
            for run in results["runs"]
            if run["miss"]
        ),
    ]
    lines += [
        "",
        "| simulated quiet steps | stages vary by | longer by a tail | false alarms per 1,000 |",
        "|---|---|---|---|",
        *(
            f"| {one['steps']:,} | {one['spread']:.0%} | {one['tail']:.0%} "
            f"| {1000 * one['noticed'] / one['steps']:.3f} |"
            for one in results["simulated"]
        ),
    ]
    lines += ["", where(results["measured"])]
    return "\n".join(lines)


def where(measured: dict[str, Any]) -> str:
    """Return what was measured, on what, and when, as a sentence."""
    return (
        f"Measured at version {measured['version']}, commit `{measured['commit']}`, on {measured['date']}: "
        f"{measured['cpu']}, {measured['cores']} cores, load average {measured['load']}, "
        f"Python {measured['python']}."
    )


def _share(right: Any) -> str:
    told = [one for one in right if one is not None]
    return f"{sum(told)} of {len(told)}" if told else ""
