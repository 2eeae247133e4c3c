"""The command line's parser: an error is one line, with exit code 2."""

import argparse
import re
import sys
import textwrap
from typing import Any, NoReturn

from typing_extensions import override

from lightning_mp.ground.core.known_words import did_you_mean

_WIDEST_CHOICES = 40


def _has_long_choices(action: argparse.Action) -> bool:
    return action.metavar is None and len(", ".join(map(str, action.choices or ()))) > _WIDEST_CHOICES


class _HelpFormatter(argparse.HelpFormatter):
    """Fits into a terminal: paragraphs are filled, examples are not; long choices go into the text of the option."""

    @override
    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if _has_long_choices(action):
            return lambda size: (default_metavar,) * size
        return super()._metavar_formatter(action, default_metavar)

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if _has_long_choices(action):
            return f"{', '.join(map(str, action.choices or ()))}; {action.help}"
        return super()._get_help_string(action)

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            first, *others = paragraph.split("\n")
            margin = first[: len(first) - len(first.lstrip())]
            if all(re.match(rf"{margin}\S", line) for line in others):  # one that is a list has lines further in
                words = " ".join(paragraph.split())
                wrap = textwrap.TextWrapper(
                    width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
                )
                paragraph = wrap.fill(words)
            paragraphs.append(textwrap.indent(paragraph, indent))
        return "\n\n".join(paragraphs)


class OneLineParser(argparse.ArgumentParser):
    """Says what was wrong in one line; a negative number in any notation is a value and no option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **settings})

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Joins an option and a negative number behind it; of those argparse knows -1 and -0.5, but not -1e21.

        Here, as a command that has verbs would name itself and not the verb that was given the unknown words.
        """
        words: list[str] = []
        for word in args if args is not None else sys.argv[1:]:
            if words and words[-1].startswith("--") and "=" not in words[-1] and re.match(r"-[\d.]", word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            near = did_you_mean(unknown[0], self._option_string_actions).replace("'", "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near and '.'}{near}")
        return known, unknown

    @override
    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2; a choice that resembles a known one is answered with that."""
        choice = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            name, got, known = choice.groups()
            if near := did_you_mean(got, re.findall(r"[^\s',]+", known)):
                message = f"argument {name}: invalid choice: '{got}'." + near.replace("'", "")
        first_word, space, rest = message.rstrip(".").partition(" ")
        if first_word.istitle():  # not the name of a class
            first_word = first_word.lower()
        end = "" if rest.endswith("?") else "."
        self.exit(2, f"{self.prog}: {first_word}{space}{rest}{end} See {self.prog} --help.\n")
