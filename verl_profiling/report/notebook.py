"""A report that a notebook shows as its page."""

from __future__ import annotations

from html import escape

import msgspec

from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report

__all__ = ["NotebookReport"]


class NotebookReport(Report, frozen=True, kw_only=True):
    """A report whose last line in a notebook's cell is its page.

    The page is in a frame without an origin: its style and script cannot reach the notebook, nor
    the notebook's the page. It loads nothing from anywhere.
    """

    @classmethod
    def of(cls, report: Report) -> NotebookReport:
        """Return the same report, as one that a notebook shows."""
        return cls(**{name: getattr(report, name) for name in msgspec.structs.asdict(report)})

    def __repr__(self) -> str:
        title = "one step" if self.step is None else f"step {self.step}"
        return (
            f"<report of {title}: {self.span_us / 1e6:.3f} s, {len(self.workers)} lanes, "
            f"{len(self.findings)} findings>"
        )

    def _repr_html_(self) -> str:
        page = escape(render_html(self), quote=True)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="{escape(repr(self))}" '
            'style="width: 100%; height: 720px; border: 0"></iframe>'
        )
