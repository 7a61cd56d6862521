"""Merging: CPU seconds and peak memory of each merger, side by side, on real torch traces.

Run: ``python benchmarks/bench_merge.py [--runs 5] [--scale 1.0] [--only NAME ...]``

It records 8 traces of about 100k events and one of about 1M with torch.profiler, and merges
them in fresh processes: the CPU seconds are those of the process and its children, the
memory is the largest resident set of any one of them (``getrusage``, ``ru_maxrss``).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = "verl-profiling"
MERGERS = {
    OURS: """
        from verl_profiling.cli import main
        main(["merge", folder, "-o", output])
    """,
    "archive": """
        from verl_profiling.cli import main
        main(["merge", folder, "-o", output, "--format", "archive"])
    """,
    "copy": """
        import shutil
        for number, file in enumerate(files):
            shutil.copyfile(file, f"{output}.{number}")
    """,
    "viztracer": """
        from viztracer.report_builder import ReportBuilder
        with open(output, "w") as file:
            ReportBuilder(files, verbose=0).save(file)
    """,
    "json": """
        # The way of SGLang's merger: read all with json, prefix the processes, dump with gzip.
        import gzip, json
        merged = {"traceEvents": []}
        for number, name in enumerate(files):
            with open(name) as file:
                trace = json.load(file)
            for event in trace["traceEvents"]:
                event["pid"] = f"[rank{number}] {event.get('pid')}"
            merged["traceEvents"] += trace["traceEvents"]
        with gzip.open(output, "wt") as file:
            json.dump(merged, file)
    """,
}


def record(path: str, events: int) -> None:
    """Record a real torch trace of about ``events`` events (in a process of its own)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    inputs = torch.randn(2, 16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(events // 270):
            model(inputs).sum().backward()
    profiler.export_chrome_trace(path)


def measure(name: str, folder: Path, output: Path) -> tuple[float, float]:
    """Return CPU seconds and peak MB of one merge in a fresh process."""
    body = "\n".join(line.removeprefix("        ") for line in MERGERS[name].splitlines())
    files = [str(file) for file in sorted(folder.glob("*.json*"))]
    program = (
        f"import json, resource, sys\nfolder, output, files = {str(folder)!r}, {str(output)!r}, {files!r}\n"
        f"if __name__ == '__main__':\n"
        + "\n".join(f"    {line}" for line in body.splitlines())
        + "\n    mine, theirs = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "    cpu = sum(u.ru_utime + u.ru_stime for u in (mine, theirs))\n"
        "    print(json.dumps([cpu, max(mine.ru_maxrss, theirs.ru_maxrss) / 1024]))\n"
    )
    script = output.with_suffix(".py")
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    for file in output.parent.glob(f"{output.name}*"):
        file.unlink()
    cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return cpu, peak


def main() -> None:
    """Record, merge, and print the table, the ratios, and how the cost grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of events")
    parser.add_argument("--only", nargs="*", choices=MERGERS, help="mergers to run")
    parser.add_argument("--keep", type=Path, help="folder of recorded traces, to reuse them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        sets = {"8 x 100k": [100_000] * 8, "1 x 1M": [1_000_000]}
        for name, sizes in sets.items():
            folder = root / name.replace(" ", "")
            record_all(folder, [int(size * arguments.scale) for size in sizes])
            size_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            print(f"\n{name} events, {size_mb:.0f} MB of JSON, median of {arguments.runs} runs")
            compare(folder, arguments.only or list(MERGERS), arguments.runs, Path(scratch))
        linearity(root / "8x100k", Path(scratch), arguments.runs)


def record_all(folder: Path, sizes: list[int]) -> None:
    """Record the traces of a set that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, events in enumerate(sizes):
        path = folder / f"trace_rank{rank}.json"
        if not path.exists():
            command = f"import bench_merge; bench_merge.record({str(path)!r}, {events})"
            subprocess.run([sys.executable, "-c", command], check=True, cwd=Path(__file__).parent)


def compare(folder: Path, names: list[str], runs: int, scratch: Path) -> None:
    """Print CPU seconds and peak memory of each merger, and the ratio to ours."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            found[name].append(measure(name, folder, scratch / "merged.json.gz"))
    ours = statistics.median(cpu for cpu, _ in found[OURS]) if OURS in found else None
    print(f"{'merger':<16}{'CPU s':>10}{'peak MB':>10}{'CPU / ours':>12}")
    for name, results in found.items():
        cpu, peak = statistics.median(c for c, _ in results), max(p for _, p in results)
        ratio = f"{cpu / ours:>12.2f}" if ours else ""
        print(f"{name:<16}{cpu:>10.2f}{peak:>10.0f}{ratio}")


def linearity(folder: Path, scratch: Path, runs: int) -> None:
    """Print the cost of 1x, 2x and 4x the bytes, and project 64 ranks of 200 MB on 2 cores."""
    files = sorted(folder.glob("*.json"))
    print("\ngrowth (files, MB, CPU s, CPU s per 100 MB, peak MB)")
    slopes = []
    for count in (2, 4, 8):
        part = scratch / f"part{count}"
        part.mkdir()
        for file in files[:count]:
            shutil.copyfile(file, part / file.name)
        size_mb = sum(file.stat().st_size for file in part.iterdir()) / 1e6
        results = [measure(OURS, part, scratch / "merged.json.gz") for _ in range(runs)]
        cpu = statistics.median(c for c, _ in results)
        slopes.append((size_mb, cpu))
        print(f"{count:>3}{size_mb:>10.0f}{cpu:>10.2f}{cpu / size_mb * 100:>10.2f}{max(p for _, p in results):>10.0f}")
    (small, cpu_small), _, (large, cpu_large) = slopes
    slope = (cpu_large - cpu_small) / (large - small)
    seconds = slope * 64 * 200 / 2
    print(f"64 ranks x 200 MB: {seconds:.0f} s on 2 cores, if the cost stays {slope * 100:.2f} CPU s per 100 MB of JSON")
    print("and both cores are busy (members are independent; memory is per process and does not grow).")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
