"""Reporting: CPU seconds and peak memory of our report and of HolisticTraceAnalysis, side by side.

Run: ``python benchmarks/bench_report.py [--runs 5] [--events 216000] [--hta PYTHON]``

The traces are the public GPU trace in ``tests/data``, its three steps repeated end to end
until each of 8 ranks has about the wanted number of events (names, nesting and overlap stay
real; only times and ids move). HTA is loaded and asked for its temporal breakdown and its
communication/computation overlap; our report computes everything it has. ``--hta`` names a
Python that has ``HolisticTraceAnalysis==0.5.0``; by default it is that of ``make test-hta``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from results import record, row

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "data" / "nccl_data.json.gz"
HTA_PYTHON = ROOT / ".venv-hta" / "bin" / "python"
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
RANKS = 8
PEERS = {
    "HolisticTraceAnalysis 0.5.0": "`TraceAnalysis` of the files, `get_temporal_breakdown()` and "
    "`get_comm_comp_overlap()` without plots; all steps included, no rounding to nanoseconds"
}
OURS = f"""
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from verl_profiling.analysis import CapturedStep
from verl_profiling.steps.inputs import find_steps
(step,) = find_steps(Path(folder))
report = CapturedStep(step).report()
rows = [[100 * w.idle_us / w.span_us, 100 * w.compute_us / w.span_us] for w in report.workers]
"""
HTA = """
import os, logging
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files = {rank: f"{folder}/trace_rank{rank}.json.gz" for rank in range(8)}
analysis = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
breakdown = analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
rows = breakdown[["idle_time_pctg", "compute_time_pctg"]].values.tolist()
"""
MEASURE = """
import json, resource, sys
folder = sys.argv[1]
if __name__ == "__main__":
{body}
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(use.ru_utime + use.ru_stime for use in uses)
    print(json.dumps([cpu, max(use.ru_maxrss for use in uses) / 1024, rows]))
"""


def make_traces(folder: Path, wanted: int) -> None:
    """Write one trace per rank with about so many events."""
    content = json.loads(gzip.decompress(SOURCE.read_bytes()))
    events = content["traceEvents"]
    own = sum(event.get("cat") in DEVICE for event in events)
    period = max(e["ts"] + e.get("dur", 0) for e in events) - min(e["ts"] for e in events) + 1000
    copies = max(round(wanted / len(events)), 1)
    for rank in range(RANKS):
        content["distributedInfo"]["rank"] = rank
        repeated = [
            {**event, "ts": round(event["ts"] + copy * period, 3)}
            for copy in range(copies)
            for event in events
            if copy == 0 or event["ph"] != "M"
        ]
        text = json.dumps({**content, "traceEvents": repeated})
        (folder / f"trace_rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1))
    print(f"{RANKS} traces, {copies * own:,} device events and {len(repeated):,} events in each")


def measure(python: str, body: str, folder: Path) -> tuple[float, float, list[list[float]]]:
    """Return CPU seconds, peak MB of a process, and the percentages by rank."""
    program = MEASURE.format(body="\n".join(f"    {line}" for line in body.strip().splitlines()))
    script = folder.parent / "measure.py"
    script.write_text(program)
    done = subprocess.run(
        [python, str(script), str(folder)], capture_output=True, text=True, check=True
    )
    cpu, peak, rows = json.loads(done.stdout.splitlines()[-1])
    return cpu, peak, rows


def main() -> None:
    """Make the traces, run both, and print the table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--events", type=int, default=216_000, help="events in each trace")
    parser.add_argument(
        "--hta", default=str(HTA_PYTHON), metavar="PYTHON", help="a Python that has HTA 0.5.0"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "traces"
        folder.mkdir()
        # In a process of its own: a process that is forked from a large one starts with its peak.
        command = (
            f"import bench_report as b; b.make_traces(b.Path({str(folder)!r}), {arguments.events})"
        )
        subprocess.run([sys.executable, "-c", command], check=True, cwd=Path(__file__).parent)
        found: dict[str, list[tuple[float, float, list[list[float]]]]] = {
            "verl-profiling": [],
            "HTA 0.5": [],
        }
        for _ in range(arguments.runs):
            found["verl-profiling"].append(measure(sys.executable, OURS, folder))
            found["HTA 0.5"].append(measure(arguments.hta, HTA, folder))
    ours, theirs = found.values()
    whole = "`report`, all of it"
    rows = [
        row(
            f"{whole} (peak {max(peak for _, peak, _ in ours):,.0f} MB)",
            [cpu for cpu, _, _ in ours],
            "CPU s",
        ),
        row(
            "HolisticTraceAnalysis: load, temporal breakdown, overlap "
            f"(peak {max(peak for _, peak, _ in theirs):,.0f} MB)",
            [cpu for cpu, _, _ in theirs],
            "CPU s",
            against=whole,
            of=[cpu for cpu, _, _ in ours],
        ),
    ]
    record(
        "report",
        rows,
        method=f"{RANKS} GPU traces of {arguments.events:,} events each. "
        f"{arguments.runs} runs each, "
        "in turn, in fresh processes, imports included.",
        peers=PEERS,
    )
    pairs = zip(found["verl-profiling"][0][2], found["HTA 0.5"][0][2], strict=True)
    apart = max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    print(f"largest difference of idle and compute: {apart:.3f} percentage points")


if __name__ == "__main__":
    main()
