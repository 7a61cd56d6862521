"""The report as notebooks show it."""

from __future__ import annotations

from html import escape

from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report


class NotebookReport(Report, frozen=True, kw_only=True):
    """A report that a notebook shows as its page, in a sandboxed frame."""

    def _repr_html_(self) -> str:
        page = render_html(self)
        return (
            f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="{escape(repr(self))}" '
            'style="width: 100%; height: 720px; border: 0"></iframe>'
        )
