"""Memory of devices in a run: the step in which the least was free, and each stage's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from rich.table import Table
from rich.text import Text

from verl_profiling.files.device_use import PARTS
from verl_profiling.files.engine_marks import WAKE
from verl_profiling.files.step_summary import DeviceHolder, HandOff, Overlap, StepSummary
from verl_profiling.report.console import table_of
from verl_profiling.units import byte_size, duration, visible

DEVICES = "Device memory by stage"
"""Title of the table."""


def hand_off_sentence(steps: Sequence[StepSummary]) -> str:
    """Return a sentence on when the least memory of a device was free; empty if unknown."""
    known = [step for step in steps if step.hand_off is not None]
    if not known:
        return ""
    step = min(known, key=lambda step: step.hand_off.free_bytes)  # type: ignore[union-attr]
    least = step.hand_off
    assert least is not None
    where = f"between {least.before} and {least.after}"
    if not (least.before and least.after):
        where = f"before {least.after}" if least.after else f"after {least.before}"
    elif least.before == least.after:
        where = f"in {least.after}"
    held = [*map(_held, least.holders), *[f"{lane} unknown" for lane in least.unread]]
    sentence = (
        f"least free {byte_size(least.free_bytes)} of {byte_size(least.total_bytes)} in step "
        f"{step.step}, {where}: {', '.join(held)}"
    )
    if least.overlap is not None:
        is_colocated = any(total.name.partition("/")[0] == WAKE for total in step.spans)
        sentence += f"; {_remedy(least, least.overlap, is_colocated)}"
    return sentence


def _held(holder: DeviceHolder) -> str:
    parts = [f"{name} {byte_size(size)}" for name, size in holder.parts.items()]
    if holder.cached_bytes:
        parts.append(f"cached {byte_size(holder.cached_bytes)}")
    inside = f" ({', '.join(parts)})" if parts else ""
    return f"{holder.lane or 'others'} {byte_size(holder.held_bytes)}{inside}"


def _remedy(least: HandOff, overlap: Overlap, is_colocated: bool) -> str:
    """Return a clause on what was held twice, and what would fit if it was not."""
    holder, size = overlap.holder, overlap.size_bytes
    before = least.after or "the next stage"
    way = f"release them in {holder.lane} before {before}"
    enough = [part for part in PARTS if holder.parts.get(part, 0) >= size]
    if holder.cached_bytes >= size:
        way = f"empty the cache of torch's allocator in {holder.lane} before {before}"
    elif enough:
        way = f"offload the {enough[0]} of {holder.lane} before {before}"
    if is_colocated and not overlap.other:
        share = ceil(100 * size / least.total_bytes) / 100
        way += f", or lower gpu_memory_utilization by {share:.2f}"
    return (
        f"{holder.lane} and {overlap.other or 'others'} held {byte_size(size)} twice, for "
        f"{duration(overlap.least_ns / 1e9)} to {duration(overlap.most_ns / 1e9)}: {way}, and "
        f"{byte_size(least.free_bytes + size)} are free"
    )


def device_table(steps: Sequence[StepSummary]) -> Table:
    """Return the memory of devices by role and stage in the last step with a reading."""
    headings = ("device memory", "stage", "at begin", "at end", "peak", "growth a step")
    table = table_of("", headings, texts=(1,))
    known = [step for step in steps if step.devices]
    if not known:
        return table
    for row in known[-1].devices:
        sizes = (row.begin_bytes, row.end_bytes, row.peak_bytes)
        cells = [row.role, row.stage]
        cells += ["" if size is None else byte_size(size) for size in sizes]
        cells.append("".join(_growth(known, row.role, row.stage)))
        table.add_row(*[Text(visible(cell)) for cell in cells])
    return table


def _growth(steps: Sequence[StepSummary], role: str, stage: str) -> Iterator[str]:
    """Yield the growth of a stage's end from the first step to the last one, if there are two."""
    sizes = {
        step.step: row.end_bytes
        for step in steps
        for row in step.devices
        if (row.role, row.stage) == (role, stage) and row.end_bytes is not None
    }
    first, last = min(sizes, default=0), max(sizes, default=0)
    if sizes and sizes[last] != sizes[first]:
        grown = (sizes[last] - sizes[first]) / (last - first)
        yield f"{'-' if grown < 0 else '+'}{byte_size(abs(grown))}"
