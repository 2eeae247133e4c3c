"""Settings of the documentation site; `make docs` builds it into build/docs.

Links into the documentation of Python, torch, Lightning and torchmetrics need their inventories, which Sphinx fetches.
Where there is no network those links are left out, unless DOCS_INVENTORIES=required asks for them, as CI does.
"""

import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from sphinx.application import Sphinx

from lightning_mp import __version__

INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/stable/",
    "torchmetrics": "https://lightning.ai/docs/torchmetrics/stable/",
}


def answers(site: str) -> bool:
    """Whether the inventory of `site` can be fetched from here."""
    try:
        with urllib.request.urlopen(f"{site}objects.inv", timeout=3) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from figures import drifted  # noqa: E402

if pages := drifted():
    raise SystemExit(f"{', '.join(pages)}: a figure is not that of docs/results. Run python scripts/figures.py.")

REQUIRED = os.environ.get("DOCS_INVENTORIES") == "required"

project = "lightning_mp"
author = "lightning_mp contributors"
copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
exclude_patterns = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["tables.css"]

html_theme = "furo"
html_title = f"lightning_mp {release}"
html_copy_source = False
html_show_sphinx = False

# Headings are linked to by the names that GitHub gives them, so every page reads the same there.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# The notebooks carry their outputs; `make notebooks` runs them.
nb_execution_mode = "off"
# tables among the outputs
nb_render_markdown_format = "gfm"

autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# A Lightning hook without a docstring of its own would repeat Lightning's on every page.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

intersphinx_mapping = {name: (site, None) for name, site in INVENTORIES.items() if REQUIRED or answers(site)}
intersphinx_timeout = 30

# What Lightning calls is documented there; a user of this package never calls it.
HOOKS = {
    name
    for base in (Callback, MixedPrecision, FSDPPrecision, FSDPStrategy, ModelParallelStrategy)
    for name in dir(base)
}


def setup(app: Sphinx) -> None:
    """Leave out of the API pages what is no part of the public interface."""
    app.connect("autodoc-skip-member", lambda _app, _what, name, _object, skip, _options: skip or name in HOOKS)
    app.connect("autodoc-process-bases", _public_bases)
    app.connect("object-description-transform", _without_object_base)
    app.connect("source-read", _link_notebooks)


def _link_notebooks(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Links to notebooks are written for GitHub; Sphinx does not find its pages behind the link docs/notebooks."""
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./(notebooks/\w+)\.ipynb\)", r"{doc}`\1 </\2>`", source[0])


def _public_bases(_app: Sphinx, _name: str, _object: Any, _options: Any, bases: list[type]) -> None:
    bases[:] = [base for base in bases if not base.__module__.startswith("lightning_mp.")] or [object]


def _without_object_base(_app: Sphinx, _domain: str, kind: str, content: Any) -> None:
    """A class without a public base would be shown with "Bases: object"."""
    if kind == "class" and content.children and content[0].astext() == "Bases: object":
        content.pop(0)
