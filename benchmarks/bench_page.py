"""The HTML page: its size, and the CPU seconds to render it, of steps with more and more lanes.

Run: ``python benchmarks/bench_page.py [--runs 5]``

The steps are those that the tests draw: training ranks with stages, kernels and collectives, of which one is
slow, and a fourth as many rollout replicas with requests and iterations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from results import record, row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from drawn_steps import whole_step

from verl_profiling.report.html import render_html

RANKS = (8, 64, 240)
CODE = (
    "verl_profiling/report/html.py",
    "verl_profiling/report/picture.py",
)


def main() -> None:
    """Draw the steps, render them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    rows = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            report = whole_step(Path(folder), ranks=ranks, replicas=ranks // 4, fault="slow rank")
        took = []
        for _ in range(runs):
            begin = time.process_time()
            page = render_html(report)
            took.append(time.process_time() - begin)
        lanes = f"{ranks} ranks and {ranks // 4} replicas"
        rows += [
            row(f"{lanes}: size", [len(page.encode()) / 1000], "kB"),
            row(f"{lanes}: to render", [1000 * seconds for seconds in took], "ms"),
        ]
    record("page", rows, method=f"Drawn steps. {runs} runs each, CPU time.", code=CODE, peers={})


if __name__ == "__main__":
    main()
