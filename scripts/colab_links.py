"""Give each notebook a link that opens it on Colab, and a cell that installs the package there.

The address of the repository is set in one place, pyproject.toml; without one the notebooks have neither link nor cell:

    [project.urls]
    Repository = "https://github.com/OWNER/REPOSITORY"

python scripts/colab_links.py
"""

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IDS = ("colab-link", "colab-install")
INSTALL = """\
import importlib.util

if importlib.util.find_spec("lightning_mp") is None:
    %pip install -q "lightning-mp[plots] @ git+{repository}"
"""


def repository() -> str | None:
    """The address that pyproject.toml gives, if any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address: str | None = project.get("urls", {}).get("Repository")
    return address


def with_links(notebook: dict[str, Any], name: str, repository: str | None) -> dict[str, Any]:
    """The notebook with link and cell after its first cell, or without both."""
    first, *rest = (cell for cell in notebook["cells"] if cell.get("id") not in IDS)
    added = []
    if repository is not None:
        page = repository.replace("https://github.com", "https://colab.research.google.com/github")
        link = f"[Open in Colab]({page}/blob/main/notebooks/{name})"
        install = INSTALL.format(repository=repository).splitlines(True)
        added = [
            {"cell_type": "markdown", "id": IDS[0], "metadata": {}, "source": [link]},
            {"cell_type": "code", "id": IDS[1], "metadata": {}, "source": install}
            | {"execution_count": None, "outputs": []},
        ]
    return notebook | {"cells": [first, *added, *rest]}


if __name__ == "__main__":
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        linked = with_links(json.loads(path.read_text()), path.name, repository())
        path.write_text(json.dumps(linked, indent=1, ensure_ascii=False) + "\n")
