"""What the HTML pages are made of: their shell, their tables and charts, style and script."""
