"""How Sphinx builds the site: ``make docs``. Nothing is loaded from a network, neither here nor by the pages."""

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import generated
from sphinx.errors import ExtensionError

from pipeloom.plotting.palette import HUES, INK, mix

project = "pipeloom"
author = "The pipeloom authors"
copyright = "The pipeloom authors, Apache-2.0"
release = version = version_of("pipeloom")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_site"]
root_doc = "index"
nitpicky = False  # annotations name types that have no page of their own

myst_enable_extensions = ["attrs_inline", "attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # it makes one dash of the two of a flag, in sentences that come from help texts
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # in the text of a class, where they are no second entry for a field that has its own

html_theme = "furo"
html_title = "pipeloom"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
# Links are blue, in a tone that is legible on the ground of each mode.
_MODES = [
    {"color-brand-primary": blue, "color-brand-content": blue, "with-torch": HUES["recompute"], "core": HUES["forward"]}
    for blue in (mix("#4477aa", INK, 0.25), HUES["forward"])
]
html_theme_options = {"light_css_variables": _MODES[0], "dark_css_variables": _MODES[1]}
copybutton_prompt_text = "$ "


def setup(app):
    """Insert what is generated while the pages are read, and check what is written."""
    app.connect("source-read", generated.fill_in)
    app.connect("build-finished", check_pages)
    app.connect("autodoc-process-docstring", end_literals)


def end_literals(*event):
    """Write "``Row``s" as reStructuredText wants it, where a letter may not follow a literal."""
    lines = event[-1]
    text = re.sub(
        r"(``[^`]+``)(\w?)", lambda found: f"{found[1]}\\ {found[2]}" if found[2] else found[1], "\n".join(lines)
    )
    lines[:] = text.split("\n")


def check_pages(app, failure):
    """Fail the build if a page loads anything over the network or is missing from the search index."""
    if failure is not None or app.builder.name != "html":
        return
    written = Path(app.outdir)
    index = (written / "searchindex.js").read_text(encoding="utf-8")
    problems = [f"the search lacks {name}" for name in app.env.found_docs if f'"{name}"' not in index]
    for page in sorted(written.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        if re.search(r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=\"(https?:)?//", text):
            problems.append(f"{page.name} loads something from a network")
    if problems:
        raise ExtensionError("\n".join(problems))
