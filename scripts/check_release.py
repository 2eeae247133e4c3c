"""Check that a release is named alike everywhere: `python scripts/check_release.py 0.1.0`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "lightning_mp/_version.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "CHANGELOG.md": r"^## \[(\d.*?)\] - \d{4}-\d{2}-\d{2}$",
}


def versions() -> dict[str, str | None]:
    """File -> the version that it names first; None where it names none."""
    found = {file: re.search(pattern, (ROOT / file).read_text(), re.MULTILINE) for file, pattern in PLACES.items()}
    return {file: match[1] if match else None for file, match in found.items()}


def main(release: str) -> int:
    """Prints what differs; 1 if anything does."""
    wrong = {file: version for file, version in versions().items() if version != release}
    for file, version in wrong.items():
        print(f"{file} names {version or 'no release'}, but the release is {release}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
