"""What the loop's process does outside of a captured step: before it, and until it begins the next one."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from verl_profiling.capture.stage import SpanLog
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.manifest import Manifest

__all__ = ["Outside"]

logger = logging.getLogger(__name__)


class Outside:
    """Keeps spans from the start of a capture on until the step after it begins, or training ends.

    The manifest is written before that is so, and holds what there is of them by then.

    Attributes:
        spans: The pauses in which the capture starts and stops, and the loop's stages after the step.
        folder: The step folder, once this process has written its manifest.
    """

    def __init__(self) -> None:
        self.spans = SpanLog()
        self.folder: Path | None = None

    def enter(self, folders: StepFolders) -> None:
        """Enter the spans into the manifest. An error is logged: the step that begins needs none of it."""
        folder, spans = self.folder, self.spans.close()
        if folder is None:
            return

        def with_spans(manifest: Manifest) -> Manifest:
            notes = [*manifest.notes, *self.spans.notes()]
            return msgspec.structs.replace(manifest, outside=spans, notes=notes)

        try:
            folders.update(folder, with_spans)
        except OSError as error:
            logger.warning("%s does not say what followed the step: %s", folder, error)
