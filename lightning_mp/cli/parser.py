"""The command line's parser: an error is one line, with exit code 2."""

import argparse
import re
import sys
from typing import Any, NoReturn

__all__ = ["OneLineParser"]


class OneLineParser(argparse.ArgumentParser):
    """Says what was wrong in one line; a negative number in any notation is a value and no option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Joins an option and a negative number behind it; of those argparse knows -1 and -0.5, but not -1e21."""
        words: list[str] = []
        for word in args if args is not None else sys.argv[1:]:
            if words and words[-1].startswith("--") and "=" not in words[-1] and re.match(r"-[\d.]", word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        first_word, space, rest = message.rstrip(".").partition(" ")
        if first_word.istitle():  # not the name of a class
            first_word = first_word.lower()
        self.exit(2, f"{self.prog}: {first_word}{space}{rest}. See {self.prog} --help.\n")
