"""Sphinx configuration: `make docs` builds the site, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gradscale_ext

sys.path.insert(0, str(Path(__file__).parent))
import write_api

project = "gradscale_ext"
copyright = "the authors of gradscale_ext, Apache License 2.0"
version = release = gradscale_ext.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "api"]  # the folder has the text of api.md for readers without the site
# Docstrings put names and shapes between single backticks: a link if such an object exists, code otherwise.
default_role = "py:obj"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

add_module_names = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give more: shapes, ranges and units
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Returns"]  # as plain text: the words before a colon are not a type
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
pygments_dark_style = "one-dark"
html_title = f"gradscale_ext {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    app.connect("source-read", add_index)


def add_index(app: Any, page: str, source: list[str]) -> None:
    """The page on the API begins with a table of its names."""
    if page == "api":
        source[0] = source[0].replace("<!-- index -->", write_api.index_of_site())
