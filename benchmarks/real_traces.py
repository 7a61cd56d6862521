"""Makes traces as large as those of users from real ones: Python stacks, arrows, metadata before
each event.

The events of the public GPU trace in ``tests/data`` are repeated end to end as text, so that names,
nesting, arguments and layout stay as they were written; only times and the ids of arrows move. All
traces begin in the same second, as those of one step do.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "tests" / "data" / "nccl_data.json.gz"
BEGIN_NS = 1_800_000_000 * 10**9
_BASE = re.compile(rb'("baseTimeNanoseconds": )\d+')
_TIME = re.compile(rb'("ts": )(\d+)')
_ARROW = re.compile(rb'("ph": "[sf]", "id": )(\d+)')
_ON_DEVICE = re.compile(rb'\{\s*"ph": "X", "cat": "kernel", [^{]*?"pid": (\d+), "tid": (\d+),')
_METADATA = (
    ("process_name", '"name": "python"'),
    ("process_labels", '"labels": "GPU"'),
    ("process_sort_index", '"sort_index": 5000000'),
    ("thread_name", '"name": "stream"'),
    ("thread_sort_index", '"sort_index": 7'),
)


def repeat_gpu_trace(path: str, rank: int, copies: int, *, named: bool = False) -> None:
    """Write the GPU trace so many times, end to end.

    Args:
        path: File to write.
        rank: The rank that it is said to be of.
        copies: How often its 40,573 events are repeated.
        named: Whether each kernel comes after five events of metadata that name its process and its
            stream, as the profilers of some accelerators write them.
    """
    content = _begun(gzip.decompress(SOURCE.read_bytes())).replace(
        b'"rank": 0,', b'"rank": %d,' % rank, 1
    )
    begin = content.index(b"[", content.index(b'"traceEvents"')) + 1
    end = content.rindex(b"\n  ]", 0, content.index(b'"traceName"'))
    events = content[begin:end]
    if named:
        events = _ON_DEVICE.sub(_with_names, events)
    times = [int(match[2]) for match in _TIME.finditer(events) if int(match[2])]
    period_us = max(times) - min(times) + 100_000
    with Path(path).open("wb") as file:
        file.write(content[:begin])
        for copy in range(copies):
            file.write(b"," if copy else b"")
            moved = _TIME.sub(_adding(copy * period_us), events)
            file.write(_ARROW.sub(_adding(copy * 10_000_000), moved))
        file.write(content[end:])


def _begun(content: bytes) -> bytes:
    """Return a trace with the base by which it begins in the common second."""
    first_us = min(int(match[2]) for match in _TIME.finditer(content) if int(match[2]))
    base_ns = (BEGIN_NS - first_us * 1000) // 10**9 * 10**9
    return _BASE.sub(rb"\g<1>%d" % base_ns, content)


def _adding(number: int) -> Callable[[re.Match[bytes]], bytes]:
    return lambda match: match[1] + b"%d" % (int(match[2]) + number)


def _with_names(event: re.Match[bytes]) -> bytes:
    pid, tid = (number.decode() for number in event.groups())
    named = "".join(
        f'{{\n    "name": "{name}", "ph": "M", "ts": 0.000, "pid": {pid}, "tid": {tid},\n'
        f'    "args": {{\n      {arguments}\n    }}\n  }},\n  '
        for name, arguments in _METADATA
    )
    return named.encode() + event[0]


def record_with_stacks(path: str, steps: int) -> None:
    """Record training steps of a small model with Python stacks
    and shapes (about 18,000 events each).
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(block, 8, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True
    ) as profiler:
        for _ in range(steps):
            model(torch.randn(2, 16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(path)
    Path(path).write_bytes(_begun(Path(path).read_bytes()))
