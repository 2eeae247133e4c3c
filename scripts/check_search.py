"""Fails where the site's search does not find a page among the first three.

    python scripts/check_search.py build/docs

The score is that of Sphinx's searchtools.js for words: 15 in a title or heading of a page, 5 in its text, and a page
needs every word. Names of the API are left out.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

WANTED = {
    "ema": "averages",
    "hugging face": "recipes",
    "tokens per second": "mfu",
    "export onnx": "export",
    "early stopping": "averages",
    "images": "recipes",
    "loss spike after resume": "troubleshooting",
    "scheduler on a skipped step": "overflow",
    "gradient norm": "logged_names",
    "effective batch size": "accumulation",
    "nan loss": "troubleshooting",
    "out of memory": "out_of_memory",
    "lora": "recipes",
    "gan": "recipes",
    "mfu": "mfu",
    "resume": "resume",
}
FIRST = 3


def best_pages(index: dict[str, Any], query: str) -> list[str]:
    """Names of pages, best first."""
    english = SearchEnglish({})
    words = [english.stem(word) for word in re.findall(r"\w+", query.lower()) if word not in english.stopwords]
    scores: dict[int, float] = {}
    for page in range(len(index["docnames"])):
        found = [
            max(15 * _holds(index["titleterms"], word, page), 5 * _holds(index["terms"], word, page)) for word in words
        ]
        if all(found) and not index["docnames"][page].startswith("api/"):
            scores[page] = max(found)
    return [index["docnames"][page] for page in sorted(scores, key=lambda p: (-scores[p], index["titles"][p].lower()))]


def _holds(terms: dict[str, int | list[int]], word: str, page: int) -> bool:
    pages = terms.get(word, [])
    return page in (pages if isinstance(pages, list) else [pages])


def main(site: Path) -> int:
    """Prints what is not found; the exit code says whether there is any."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    missed = {
        query: pages[:FIRST]
        for query, page in WANTED.items()
        if page not in (pages := best_pages(index, query))[:FIRST]
    }
    for query, pages in missed.items():
        print(f"search for {query!r}: the first pages are {', '.join(pages) or 'none'}, without {WANTED[query]}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
