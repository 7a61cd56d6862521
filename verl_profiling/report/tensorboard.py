"""Writes reports for TensorBoard: scalars under ``profiling/``, the Gantt, and the text.

Event files are written with tensorboard's own writer, so torch is not needed. All points of a run
go into one TensorBoard run.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.report.model import Report
from verl_profiling.report.terminal import print_report

__all__ = ["scalars", "write_tensorboard"]


def write_tensorboard(reports: Sequence[Report], logdir: Path) -> None:
    """Write one point per report; a report without a step is written as step 0.

    Raises:
        ToolUnavailableError: tensorboard or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise ToolUnavailableError(
            f"--tensorboard needs {error.name}: pip install 'verl-profiling[tensorboard]'"
        ) from error
    writer = EventFileWriter(str(logdir))
    text_plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for report in reports:
        values = [
            Summary.Value(tag=f"profiling/{name}", simple_value=value) for name, value in scalars(report)
        ]
        if report.gantt:
            image = Summary.Image(**_gantt(report, Figure(figsize=(12, 6), layout="tight")))
            values.append(Summary.Value(tag="profiling/gantt", image=image))
        text = io.StringIO()
        print_report(report, Console(file=text))
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[f"```\n{text.getvalue()}\n```".encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        values.append(Summary.Value(tag="profiling/report", tensor=tensor, metadata=text_plugin))
        writer.add_event(Event(wall_time=time.time(), step=report.step or 0, summary=Summary(value=values)))
    writer.close()


def scalars(report: Report) -> Iterator[tuple[str, float]]:
    """Yield a report's main numbers by name, for any tracker of scalars."""
    yield "step_s", report.span_us / 1e6
    for stage in report.stages:
        yield f"stage/{stage.name.strip('()').replace(' ', '_')}_s", stage.duration_us / 1e6
    span = sum(row.span_us for row in report.workers) or 1.0
    yield "busy_share", sum(row.busy_us for row in report.workers) / span
    yield "exposed_communication_share", sum(row.exposed_communication_us for row in report.workers) / span
    for lost in report.lost:
        yield f"lost/{lost.cause}_s", lost.seconds
    yield "weight_sync_share", report.weight_sync_share
    if report.tail:
        yield "rollout/tail_ratio", report.tail.ratio
        yield "rollout/tail_share", report.tail.tail_share
    if report.throughput:
        yield "tokens_per_s", report.throughput.tokens_per_s


def _gantt(report: Report, figure: Any) -> dict[str, Any]:
    """Draw the runs of stages, one row per worker, the controller on top; return a PNG and its size."""
    axes = figure.add_subplot()
    lanes = list(dict.fromkeys(span.lane for span in report.gantt))
    names = list(dict.fromkeys(span.name for span in report.gantt))
    for index, name in enumerate(names):
        spans = [span for span in report.gantt if span.name == name]
        axes.barh(
            [lanes.index(span.lane) for span in spans],
            [(span.end_us - span.begin_us) / 1e6 for span in spans],
            left=[span.begin_us / 1e6 for span in spans],
            height=[0.8 - 0.25 * min(span.depth, 2) for span in spans],
            color=f"C{index % 10}",
            label=name,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, fontsize="small")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    width, height = (int(inches * figure.dpi) for inches in figure.get_size_inches())
    return {"height": height, "width": width, "colorspace": 4, "encoded_image_string": png.getvalue()}
