"""Text to train on: the Python standard library's own source, or a file. One byte is one token."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "from_bytes", "load_file", "load_standard_library", "require_blocks"]

#: Of 20 files (or of 20 equal parts of one file) one is held out.
VALIDATION_SHARE = 20

#: Read at most this much of the standard library, so that the start takes well under two seconds.
MAX_BYTES = 16 * 2**20

# Tests, vendored or generated tables, and what is not part of the library.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)


@dataclass(frozen=True)
class Corpus:
    """Text in two parts that share nothing.

    Attributes:
        train: Bytes to train on, uint8 ``[train_bytes]``.
        validation: Held-out bytes, uint8 ``[validation_bytes]``.
        source: Where the text comes from, in words.
    """

    train: Tensor
    validation: Tensor
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of both parts, 16 hexadecimal digits: tells whether two runs see the same text."""
        sha = hashlib.sha256()
        for part in (self.train, self.validation):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part.numpy().tobytes())
        return sha.hexdigest()[:16]


def load_standard_library(root: Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads the source of Python's standard library, in the order of its file names; every 20th file is held out.

    Files with the same content are read once, so none is on both sides.

    Args:
        root: Folder of ``*.py`` files; None takes ``sysconfig.get_path("stdlib")``.
        max_bytes: Stop reading after this much.

    Raises:
        ValueError: If there are not even 20 different files.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = list(_distinct_contents(sorted(_source_files(root)), max_bytes))
    if len(files) < VALIDATION_SHARE:
        raise ValueError(
            f"{root} holds {len(files)} Python source files, and at least {VALIDATION_SHARE} are needed: "
            "this Python comes without its library's source; give a text of your own with --text FILE."
        )
    train = [content for index, content in enumerate(files) if index % VALIDATION_SHARE != VALIDATION_SHARE - 1]
    held_out = files[VALIDATION_SHARE - 1 :: VALIDATION_SHARE]
    source = f"{len(files)} source files of the Python {platform.python_version()} standard library"
    return Corpus(_as_tokens(b"".join(train)), _as_tokens(b"".join(held_out)), source)


def load_file(path: Path) -> Corpus:
    """Reads one file, of any encoding; its last twentieth is held out.

    Raises:
        ValueError: If it cannot be read or is empty.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the text {str(path)!r} cannot be read ({error.strerror or error}): give a readable file with --text FILE."
        ) from error
    if not content:
        raise ValueError(f"the text {str(path)!r} is empty: give a file with some text in it with --text FILE.")
    return from_bytes(content, path.name)


def from_bytes(content: bytes, source: str) -> Corpus:
    """Splits a text: the last twentieth is held out.

    Example:
        >>> corpus = from_bytes(bytes(range(100)), "a hundred bytes")
        >>> len(corpus.train), corpus.validation
        (95, tensor([95, 96, 97, 98, 99], dtype=torch.uint8))
    """
    tokens = _as_tokens(content)
    cut = len(tokens) - max(1, len(tokens) // VALIDATION_SHARE)
    return Corpus(tokens[:cut], tokens[cut:], source)


def require_blocks(corpus: Corpus, *, block_tokens: int, train_blocks: int, validation_blocks: int) -> None:
    """Refuses a text that does not fill one training batch and one validation batch.

    Args:
        corpus: The text.
        block_tokens: Length of a sequence.
        train_blocks: Sequences of one training batch over all ranks.
        validation_blocks: Sequences of one validation batch over all ranks.

    Raises:
        ValueError: If the text is too small.
    """
    train_bytes, validation_bytes = train_blocks * block_tokens + 1, validation_blocks * block_tokens + 1
    if len(corpus.train) >= train_bytes and len(corpus.validation) >= validation_bytes:
        return
    total = len(corpus.train) + len(corpus.validation)
    needed = max(VALIDATION_SHARE * validation_bytes, train_bytes + (train_bytes - 1) // (VALIDATION_SHARE - 1))
    raise ValueError(
        f"the text ({corpus.source}) has {total:,} bytes, too few for one batch of {train_blocks} x {block_tokens} "
        f"tokens and {validation_blocks} held-out sequences: give a text of at least {needed:,} bytes with --text FILE "
        "or a smaller --batch-size."
    )


def _source_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and "-" not in name]
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


def _distinct_contents(paths: Sequence[str], max_bytes: int) -> Iterator[bytes]:
    seen: set[bytes] = set()
    read_bytes = 0
    for path in paths:
        try:
            content = Path(path).read_bytes()
        except OSError:
            continue
        key = hashlib.sha256(content).digest()
        if not content or key in seen:
            continue
        seen.add(key)
        read_bytes += len(content)
        if read_bytes > max_bytes:
            return
        yield content


def _as_tokens(content: bytes) -> Tensor:
    # frombuffer shares memory and refuses an empty buffer; a bytearray makes the tensor writable.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
