"""Writes reports for TensorBoard: scalars under ``profiling/``, the Gantt, and the text.

Event files are written with tensorboard's own writer, so torch is not needed. All points of a run
go into one TensorBoard run.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.event_file import EventFile
from verl_profiling.report.model import Report
from verl_profiling.report.scalars import scalars
from verl_profiling.report.terminal import print_report
from verl_profiling.units import time_unit

__all__ = ["write_tensorboard"]

_TOOL = "(start and stop of the tool)"


def write_tensorboard(reports: Sequence[Report], logdir: Path) -> None:
    """Write one point per report; a report without a step is written as step 0.

    Raises:
        ConfigError: Several reports have no step, so their points would fall together.
        ToolUnavailableError: tensorboard or matplotlib is missing.
    """
    if sum(report.step is None for report in reports) > 1:
        titles = "; ".join(report.title for report in reports if report.step is None)
        raise ConfigError("--tensorboard", f"needs steps with numbers, or one recording; there are: {titles}")
    try:
        from matplotlib.figure import Figure
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    except ImportError as error:
        raise ToolUnavailableError(
            f"--tensorboard needs {error.name}: pip install 'verl-profiling[tensorboard]'"
        ) from error
    file = EventFile(logdir, "--tensorboard")
    text_plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for report in reports:
        pictures = []
        if report.gantt:
            image = Summary.Image(**_gantt(report, Figure(figsize=(12, 6), layout="tight")))
            pictures.append(Summary.Value(tag="profiling/gantt", image=image))
        text = io.StringIO()
        print_report(report, Console(file=text))
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[f"```\n{text.getvalue()}\n```".encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        page = Summary.Value(tag="profiling/report", tensor=tensor, metadata=text_plugin)
        numbers = {f"profiling/{name}": value for name, value in scalars(report)}
        file.add(report.step or 0, numbers, (*pictures, page))
    file.close()


def _gantt(report: Report, figure: Any) -> dict[str, Any]:
    """Draw the runs of stages, one line per worker, the controller on top; return a PNG and its size.

    Stages side by side share the height of their line; starts and stops of tools are hatched.
    """
    axes = figure.add_subplot()
    lanes = list(dict.fromkeys(span.lane for span in report.gantt))
    unit, scale = time_unit(max((span.end_us for span in report.gantt), default=0.0) / 1e6)
    rows = Counter[str]()
    for span in report.gantt:
        rows[span.lane] = max(rows[span.lane], span.row + 1)
    names = dict.fromkeys(_TOOL if span.kind != "stage" else span.name for span in report.gantt)
    for index, name in enumerate(sorted(names, key=lambda name: name == _TOOL)):
        spans = [s for s in report.gantt if (_TOOL if s.kind != "stage" else s.name) == name]
        style = {"color": f"C{index % 10}"} if name != _TOOL else {"color": "white", "hatch": "////"}
        axes.barh(
            [lanes.index(s.lane) - 0.4 + 0.8 * (s.row + 0.5) / rows[s.lane] for s in spans],
            [(s.end_us - s.begin_us) / 1e6 / scale for s in spans],
            left=[s.begin_us / 1e6 / scale for s in spans],
            height=[(0.8 - 0.25 * min(s.depth, 2)) / rows[s.lane] for s in spans],
            edgecolor="grey" if name == _TOOL else None,
            label=name,
            **style,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, fontsize="small")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    width, height = (int(inches * figure.dpi) for inches in figure.get_size_inches())
    return {"height": height, "width": width, "colorspace": 4, "encoded_image_string": png.getvalue()}
