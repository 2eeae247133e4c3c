"""The command line's parser: an error is one line, with exit code 2."""

import argparse
from typing import NoReturn

__all__ = ["OneLineParser"]


class OneLineParser(argparse.ArgumentParser):
    """Says what was wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        first_word, space, rest = message.rstrip(".").partition(" ")
        if first_word.istitle():  # not the name of a class
            first_word = first_word.lower()
        self.exit(2, f"{self.prog}: {first_word}{space}{rest}. See {self.prog} --help.\n")
