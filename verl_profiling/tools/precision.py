"""The ``precision`` tool: values of tensors, with msprobe's ``PrecisionDebugger``."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.files.opener import make_folder, opened, whole_file
from verl_profiling.tools.base import (
    Destination,
    Output,
    Recording,
    Tool,
    folder_bytes,
    imported,
    remove_folder,
)

# How dump.json and construct.json end when they have no entries.
_NO_DATA = (b'"data": {}\n}', b"{}")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Options of the ``precision`` tool.

    Attributes:
        task: ``statistics``: minimum, maximum, mean and norm of every tensor. ``tensor``: the
            tensors themselves. ``structure``: the modules that ran, without values.
        level: ``L1``: calls of torch functions; ``L0``: modules; ``mix``: both. To record modules,
            the worker has to call :func:`watch_model`.
        only: Names of the calls or modules to record, as in msprobe's ``list``.
    """

    task: Literal["statistics", "tensor", "structure"] = "statistics"
    level: Literal["L0", "L1", "mix"] = "L1"
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.task == "structure" and self.level == "L1":
            raise ConfigError(
                "level", "must be L0 or mix with task=structure, which records modules"
            )

    def as_config(self) -> dict[str, Any]:
        """Return the options in the form of msprobe's ``config.json``."""
        task = {"list": list(self.only), "data_mode": ["all"]}
        return {"task": self.task, "level": self.level, self.task: task}


def watch_model(model: Any) -> None:
    """Set the model whose modules are recorded in this process, if ``level`` is ``L0`` or ``mix``.

    Args:
        model: A ``torch.nn.Module``. Only a weak reference to the model is kept.
    """
    global _model
    _model = weakref.ref(model)


_model: weakref.ref[Any] | None = None


class PrecisionTool(Tool):
    """Records with ``msprobe.pytorch.PrecisionDebugger``.

    A process has one debugger, which is configured once and wraps torch's functions permanently. So
    the first recording creates the debugger, each start sets folder and step, and each stop
    restores torch's functions. Between recordings, the process runs at full speed.
    """

    name = "precision"
    suffix = ".precision"
    options_class = PrecisionOptions
    conflicts = frozenset({"torch", "torch_memory", "nsys", "npu"})
    options: PrecisionOptions

    def prepare(self) -> None:
        """Import msprobe, which takes seconds."""
        imported("msprobe.pytorch", self.name, "mindstudio-probe")

    def start(self, destination: Destination) -> Recording:
        """Start recording into the folder of a destination."""
        model = None if _model is None or self.options.level == "L1" else _model()
        if model is None and self.options.level != "L1":
            raise CaptureStateError(
                f"{destination.lane}: tools.precision.level records modules, but the model "
                "is unknown; "
                "call verl_profiling.tools.precision.watch_model(model) once, or set level to L1"
            )
        recording = _PrecisionRecording(_debugger(self.options, destination.lane), destination)
        recording.start(model)
        return recording


class _PrecisionRecording(Recording):
    def __init__(self, debugger: Any, destination: Destination) -> None:
        self._debugger = debugger
        self._destination = destination
        self._folder = destination.path(PrecisionTool.suffix)
        self._file = (
            "construct.json" if debugger.service.config.task == "structure" else "dump.json"
        )

    def start(self, model: Any) -> None:
        """Switch msprobe on; after an exception, msprobe is off.

        Raises:
            CaptureStateError: msprobe did not start.
        """
        make_folder(self._folder, exist_ok=False)
        service, metadata = self._debugger.service, self._destination.metadata
        service.config.dump_path = str(self._folder)
        self._debugger.set_init_step(metadata.get("step", 0))
        service.api_register.register_all_api()
        try:
            self._debugger.start(model=model, rank_id=metadata.get("worker", {}).get("rank"))
        except Exception as error:
            self.discard()
            raise CaptureStateError(
                f"{self._destination.lane}: msprobe did not start: {error}; it only writes to "
                f"paths of letters, digits and any of _.:/- (here {self._folder})"
            ) from error

    def stop(self) -> Sequence[Output]:
        self._switch_off()
        artifact = self._destination.artifact(PrecisionTool)
        if not any(map(_holds_data, self._folder.glob(f"step*/*/{self._file}"))):
            reason = "no recorded function ran, or none in tools.precision.only"
            return [Output(artifact.with_status("empty", reason))]
        return [Output(artifact.with_status("ok", bytes=folder_bytes(self._folder)))]

    def discard(self) -> None:
        try:
            self._switch_off()
        finally:
            remove_folder(self._folder)

    def _switch_off(self) -> None:
        """Stop msprobe, and clear its remaining data,
        which would otherwise be in the next recording.
        """
        service = self._debugger.service
        try:
            self._debugger.stop()
        finally:
            service.reset_status()
            service.api_register.restore_all_api()


_made: tuple[Any, PrecisionOptions] | None = None
"""The debugger of this process, if this tool created it, and its options."""


def _debugger(options: PrecisionOptions, lane: str) -> Any:
    """Return the debugger; the first call creates it.

    Raises:
        CaptureStateError: The application has a debugger of its own, or the tool's debugger has
            other options.
    """
    global _made
    from msprobe.pytorch import PrecisionDebugger

    if _made is None:
        if PrecisionDebugger._instance is not None:
            raise CaptureStateError(
                f"{lane}: the application has a PrecisionDebugger of its own, and a process can "
                "have one; remove that one, or leave precision out of tool"
            )
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.json")
            with whole_file(config) as file:
                file.write(msgspec.json.encode(options.as_config()))
            _made = PrecisionDebugger(config_path=str(config), dump_path=folder), options
    debugger, made_with = _made
    if made_with != options:
        raise CaptureStateError(
            f"{lane}: this process's PrecisionDebugger was created with {made_with}, and cannot be "
            "created again; give the roles that share a process the same tools.precision"
        )
    return debugger


def _holds_data(written: Path) -> bool:
    """Return whether a file of msprobe has entries; msprobe writes empty files at its start."""
    with opened(written) as file:
        file.seek(max(0, written.stat().st_size - 16))
        return not file.read().endswith(_NO_DATA)
