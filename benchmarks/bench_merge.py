"""Merging: CPU seconds, time and peak memory of each merger, side by side, on real torch traces.

Run: ``python benchmarks/bench_merge.py [--runs 5] [--sglang profile_merger.py] [--parts NAME ...]``

It records 8 traces of about 100k events and one of about 1M with torch.profiler, and makes four as
users have them: two of a GPU with many arrows, one of them with its metadata before each kernel,
and a recording with Python stacks. It compresses them as a capture does, and merges them in fresh
processes. CPU seconds are those of the process and its children, without imports; memory is the
largest resident set of any one of them (``getrusage``, ``ru_maxrss``). viztracer reads no gzip, so
it gets the raw files. SGLang's merger is ``sglang/srt/utils/profile_merger.py`` of its wheel, which
runs alone; that of an installed sglang is found.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from results import record, row

OURS = "verl-profiling"
OURS_RAW = "verl-profiling, raw"
PROGRAM = """
import json, resource, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
{values}
SCOPES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)

def used():
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, SCOPES))

if __name__ == "__main__":
{body}
    peak = max(resource.getrusage(scope).ru_maxrss for scope in SCOPES) / 1024
    print(json.dumps([used() - before, time.perf_counter() - begin, peak]))
"""
SETS = (("8 x 100k", 8, 100_000), ("1 x 1M", 1, 1_000_000))
REAL, GROWTH = "real", "growth"
PARTS = (*(title for title, _, _ in SETS), REAL, GROWTH)
REAL_FILES = (
    "real_traces.repeat_gpu_trace({path!r}, 0, 6)",
    "real_traces.repeat_gpu_trace({path!r}, 1, 6)",
    "real_traces.repeat_gpu_trace({path!r}, 2, 9, named=True)",
    "real_traces.record_with_stacks({path!r}, 14)",
)
REAL_WHAT = (
    "4 files as users have them: the public GPU trace of `tests/data` repeated end to end "
    "(twice as it is, "
    "once with five events of metadata before each kernel, 108,000 in all), and a recording "
    "with Python "
    "stacks and shapes"
)
_MERGE = (
    "from pathlib import Path\nfrom verl_profiling.steps.inputs import find_steps\n"
    "from verl_profiling.timeline.merge import merge",
    "(step,) = find_steps(Path(folder))\nmerge(step, Path(output), jobs=2)",
)
MERGERS = {
    OURS: ("gz", *_MERGE),
    "SGLang": (
        "gz",
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('profile_merger', merger)\n"
        "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)",
        "module.ProfileMerger(folder, 'trace').merge_chrome_traces()",
    ),
    OURS_RAW: ("raw", *_MERGE),
    "viztracer": (
        "raw",
        "from viztracer.report_builder import ReportBuilder",
        "with open(output, 'w') as file:\n    ReportBuilder(files, verbose=0).save(file)",
    ),
}
"""The input that each merger takes, what it imports (not counted), what it does (counted)."""
LABELS = {
    OURS: "`merge`, from `.json.gz`",
    "SGLang": "SGLang's merger, from `.json.gz`",
    OURS_RAW: "`merge`, from `.json`",
    "viztracer": "viztracer's merger, from `.json`",
}
TIMED = (OURS, "SGLang", OURS_RAW, "viztracer")
"""Those of which the time is told too."""
PEERS = {
    "SGLang": "`ProfileMerger.merge_chrome_traces()` of its wheel, as it is",
    "viztracer": "`ReportBuilder(files).save()` as it is fastest: orjson is installed (its "
    "extra `full`), no "
    "progress is printed; it reads no gzip and gets the raw files",
}


def record_trace(path: str, events: int) -> None:
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


def measure(
    name: str, folder: Path, scratch: Path, merger: Path | None
) -> tuple[float, float, float]:
    """Return CPU seconds, seconds (both without imports) and peak MB of one merge
    in a fresh process.
    """
    kind, setup, body = MERGERS[name]
    output = scratch / "merged.json.gz"
    values = {
        "folder": str(folder / kind),
        "output": str(output),
        "files": [str(file) for file in sorted((folder / kind).iterdir())],
        "merger": str(merger),
    }
    program = PROGRAM.format(
        root=str(Path(__file__).parents[1]),
        values="\n".join(f"{key} = {value!r}" for key, value in values.items()),
        body="\n".join(
            f"    {line}"
            for line in f"{setup}\nbefore, begin = used(), time.perf_counter()\n{body}".splitlines()
        ),
    )
    script = scratch / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    for file in [*scratch.glob("merged*"), *(folder / kind).glob("merged-*")]:
        file.unlink()
    cpu, elapsed, peak = json.loads(done.stdout.splitlines()[-1])
    return cpu, elapsed, peak


def main() -> None:
    """Record, merge, and print the table, the ratios, and how the cost grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=MERGERS, help="mergers to run")
    parser.add_argument(
        "--sglang",
        type=Path,
        metavar="FILE",
        default=installed_merger(),
        help="SGLang's profile_merger.py",
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--keep", type=Path, help="folder of recorded traces, to reuse them")
    arguments = parser.parse_args()
    names = arguments.only or [name for name in MERGERS if name != "SGLang" or arguments.sglang]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        root = arguments.keep or scratch / "traces"
        for title, count, events in SETS:
            if title in arguments.parts:
                folder = root / title.replace(" ", "")
                record_all(folder, count, events)
                what = f"{title} events"
                compare(title, what, folder, names, arguments.runs, scratch, arguments.sglang)
        if REAL in arguments.parts:
            make_all(root / REAL, REAL_FILES)
            compare(REAL, REAL_WHAT, root / REAL, names, arguments.runs, scratch, arguments.sglang)
        if GROWTH in arguments.parts:
            folder = root / SETS[0][0].replace(" ", "")
            record_all(folder, *SETS[0][1:])
            growth(folder, scratch, arguments.runs)


def installed_merger() -> Path | None:
    """Return SGLang's merger, if sglang is installed."""
    found = importlib.util.find_spec("sglang")
    folders = found.submodule_search_locations if found else None
    return Path(folders[0]) / "srt" / "utils" / "profile_merger.py" if folders else None


def megabytes(folder: Path) -> float:
    """Return the size of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def record_all(folder: Path, count: int, events: int) -> None:
    """Record the traces of a set that are not there yet, raw and compressed."""
    make_all(folder, [f"bench_merge.record_trace({{path!r}}, {events})"] * count)


def make_all(folder: Path, calls: Sequence[str]) -> None:
    """Make the files that are not there yet, each by a call in a process of its own,
    raw and compressed.
    """
    for kind in ("raw", "gz"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for rank, call in enumerate(calls):
        raw = folder / "raw" / f"trace-TP-{rank}.trace.json"
        if not raw.exists():
            command = f"import bench_merge, real_traces; {call.format(path=str(raw))}"
            subprocess.run([sys.executable, "-c", command], check=True, cwd=Path(__file__).parent)
            compressed = folder / "gz" / f"{raw.name}.gz"
            with raw.open("rb") as source, gzip.open(compressed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target)


def compare(
    title: str,
    what: str,
    folder: Path,
    names: list[str],
    runs: int,
    scratch: Path,
    merger: Path | None,
) -> None:
    """Record CPU seconds, time and peak memory of each merger,
    and the ratio to ours on the same input.
    """
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            found[name].append(measure(name, folder, scratch, merger))
    rows = []
    for index, unit in enumerate(("CPU s", "s")):
        for name, results in found.items():
            if unit == "s" and name not in TIMED:
                continue
            ours = OURS if MERGERS[name][0] == "gz" else OURS_RAW
            compared = ours != name and ours in found
            peak = (
                f" (peak {max(result[2] for result in results):,.0f} MB)" if unit == "CPU s" else ""
            )
            rows.append(
                row(
                    f"{LABELS[name]}{peak}",
                    [result[index] for result in results],
                    unit,
                    against=LABELS[ours] if compared else "",
                    of=[result[index] for result in found[ours]] if compared else (),
                )
            )
    record(
        f"merge_{title.replace(' ', '')}",
        rows,
        method=f"{what}, {megabytes(folder / 'raw'):.0f} MB of JSON. {runs} runs each, in turn, in "
        "fresh processes, without imports; `merge` uses two processes, as its command does.",
        peers={name: setup for name, setup in PEERS.items() if name in names},
    )


def growth(folder: Path, scratch: Path, runs: int) -> None:
    """Record the cost of 1x, 2x and 4x the bytes, and project 64 ranks of 200 MB on 2 cores."""
    points, rows = [], []
    for count in (2, 4, 8):
        part = scratch / f"part{count}"
        (part / "gz").mkdir(parents=True)
        names = [f"trace-TP-{rank}.trace.json" for rank in range(count)]
        for name in names:
            (part / "gz" / f"{name}.gz").symlink_to(folder / "gz" / f"{name}.gz")
        size_mb = sum((folder / "raw" / name).stat().st_size for name in names) / 1e6
        results = [measure(OURS, part, scratch, None) for _ in range(runs)]
        cpus, peak = [cpu for cpu, _, _ in results], max(peak for _, _, peak in results)
        points.append((size_mb, statistics.median(cpus)))
        rows.append(row(f"{count} traces, {size_mb:.0f} MB (peak {peak:,.0f} MB)", cpus, "CPU s"))
    record(
        "merge_growth",
        rows,
        method=f"{LABELS[OURS]}. {runs} runs each, in fresh processes, without imports.",
        peers={},
    )
    (small, cheap), _, (large, dear) = points
    slope = (dear - cheap) / (large - small)
    print(
        f"64 ranks x 200 MB of JSON: {slope * 6_400:.0f} s on 2 cores, assuming "
        f"{slope * 100:.2f} CPU s "
        "per 100 MB as above,\nboth cores busy (members are independent) and memory flat (it "
        "is per process)"
    )


if __name__ == "__main__":
    main()
