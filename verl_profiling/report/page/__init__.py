"""The parts of the HTML pages: shell, tables, charts, style and script."""
