"""Configuration of the documentation: ``make docs``."""

from verl_profiling import __version__

project = "verl_profiling"
author = copyright = "The verl_profiling contributors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"verl_profiling {release}"

napoleon_use_ivar = True
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
