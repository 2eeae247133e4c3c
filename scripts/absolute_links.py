"""Make the links of the README absolute: a package index shows it far from the files that it links to.

python scripts/absolute_links.py https://github.com/OWNER/REPOSITORY v0.1.0
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
RELATIVE_IMAGE = re.compile(r'\b(src|srcset)="(?!https?://)([^"\s]+)"')
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """The text with links to the files of a tag; an image is linked to as the file itself."""

    def link(found: re.Match[str]) -> str:
        bang, label, path = found.groups()
        return f"{bang}[{label}]({repository}/{'raw' if bang else 'blob'}/{tag}/{path})"

    text = RELATIVE_IMAGE.sub(rf'\1="{repository}/raw/{tag}/\2"', text)
    return RELATIVE.sub(link, text)


if __name__ == "__main__":
    README.write_text(absolute(README.read_text(), *sys.argv[1:]))
