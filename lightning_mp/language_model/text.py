"""Text to train on, the Python standard library's own source or a file, and batches of it. One byte is one token."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

VALIDATION_SHARE = 20  # of 20 files, or of 20 equal parts of one file, one is held out
MAX_BYTES = 16 * 2**20  # of the standard library, so that the start takes well under two seconds
BLOCK_TOKENS = 128
_MAX_VALIDATION_BATCHES = 32  # per rank

# Tests, and generated tables; folders with a hyphen, such as site-packages, are left out as well.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "encodings", "lib2to3", "pydoc_data", "test", "tests"})


@dataclass(frozen=True)
class Corpus:
    """Text in two parts that share nothing, uint8 ``[num_bytes]`` each, and where it comes from, in words."""

    train: Tensor
    validation: Tensor
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of both parts, 16 hexadecimal digits: shows whether two runs see the same text."""
        sha = hashlib.sha256()
        for part in (self.train, self.validation):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part.numpy().tobytes())
        return sha.hexdigest()[:16]


def load_text(text: str | None) -> Corpus:
    """Reads a file, or the standard library if none is given."""
    return load_standard_library() if text is None else load_file(Path(text))


def load_standard_library(root: Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads the source of Python's standard library, in the order of its file names; every 20th file is held out.

    Files with the same content are read once, so none is on both sides. ``root`` is another folder of source files.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and "-" not in name]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files: dict[bytes, None] = {}  # a set that keeps its order
    for path in sorted(paths, key=str):
        with suppress(OSError):
            content = path.read_bytes()
            max_bytes -= len(content)
            if max_bytes < 0:
                break
            files[content] = None
    files.pop(b"", None)
    if len(files) < VALIDATION_SHARE:
        raise ValueError(
            f"{root} holds {len(files)} Python source files, and at least {VALIDATION_SHARE} are needed: this Python"
            " comes without its library's source; give a file as `text`."
        )
    train = [content for index, content in enumerate(files, start=1) if index % VALIDATION_SHARE]
    validation = list(files)[VALIDATION_SHARE - 1 :: VALIDATION_SHARE]
    source = f"{len(files)} source files of the Python {platform.python_version()} standard library"
    return Corpus(_as_tokens(b"".join(train)), _as_tokens(b"".join(validation)), source)


def load_file(path: Path) -> Corpus:
    """Reads one file, of any encoding; its last twentieth is held out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the text {str(path)!r} cannot be read ({error.strerror or error}): give a readable file as `text`."
        ) from error
    if not content:
        raise ValueError(f"the text {str(path)!r} is empty: give a file with some text in it as `text`.")
    tokens = _as_tokens(content)
    cut = len(tokens) - max(1, len(tokens) // VALIDATION_SHARE)
    return Corpus(tokens[:cut], tokens[cut:], path.name)


def _as_tokens(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)  # shares memory; of a bytearray it is writable


def _cut_blocks(text: Tensor, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens that follow them, views ``[num_blocks, block_tokens]``, without the tail of the text."""
    used = max(0, (len(text) - 1) // block_tokens) * block_tokens
    return text[:used].view(-1, block_tokens), text[1 : used + 1].view(-1, block_tokens)


@dataclass(eq=False, kw_only=True)
class TextBatches:
    """Training batches ``[inputs, labels]``, int64 ``[batch_size, block_tokens]`` each; stops and resumes anywhere.

    Every pass over the text takes its blocks in an order drawn from ``(seed, pass)``; a global batch is the next
    ``batch_size * world_size`` of them, and each rank takes its own part. So the only state is the number of batches
    served, which Lightning keeps in the checkpoint through ``state_dict``. An iteration that follows another one goes
    on where that ended.

    >>> batches = TextBatches(torch.arange(17, dtype=torch.uint8), batch_size=2, block_tokens=4)
    >>> len(batches), [inputs.shape for inputs, labels in batches]
    (2, [torch.Size([2, 4]), torch.Size([2, 4])])
    """

    text: Tensor = field(kw_only=False)  # uint8 [num_tokens]
    batch_size: int  # sequences per rank
    block_tokens: int  # per sequence
    num_batches: int | None = None  # of one iteration, over as many passes as that takes; None for one pass
    seed: int = 0
    rank: int = 0
    world_size: int = 1  # ranks that take different data

    def __post_init__(self) -> None:
        self._inputs, self._labels = _cut_blocks(self.text, self.block_tokens)
        self._global_batch_size = self.batch_size * self.world_size
        self._batches_per_pass = len(self._inputs) // self._global_batch_size
        self._served = 0
        if self._batches_per_pass == 0:
            raise ValueError(
                f"the text has {len(self._inputs)} blocks of {self.block_tokens} tokens, and one batch over all ranks "
                f"needs {self._global_batch_size}: give a longer `text`, or lower `batch_size`."
            )

    def __len__(self) -> int:
        return self.num_batches or self._batches_per_pass

    def __iter__(self) -> Iterator[list[Tensor]]:
        end = (self._served // len(self) + 1) * len(self)
        drawn_for, order = -1, torch.empty(0)
        while self._served < end:
            pass_index, position = divmod(self._served, self._batches_per_pass)
            if pass_index != drawn_for:
                # A prime far above any number of passes keeps (seed, pass) pairs apart.
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + pass_index)
                drawn_for, order = pass_index, torch.randperm(len(self._inputs), generator=generator)
            blocks = order[position * self._global_batch_size + self.rank * self.batch_size :][: self.batch_size]
            # Counted before it is handed out: a checkpoint written after training on it must not serve it again.
            self._served += 1
            yield [self._inputs[blocks].long(), self._labels[blocks].long()]

    def state_dict(self) -> dict[str, Any]:
        """The number of batches served, and how large a global batch is."""
        return {"served": self._served, "global_batch_size": self._global_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the last batch served."""
        if state_dict["global_batch_size"] != self._global_batch_size:
            raise ValueError(
                f"the checkpoint was written with batches of {state_dict['global_batch_size']} sequences over all "
                f"ranks, and this run has {self._global_batch_size}: resume with the same `batch_size` and ranks."
            )
        self._served = state_dict["served"]


class HeldOutBatches(list[list[Tensor]]):
    """The same validation batches ``[inputs, labels]`` every time, spread evenly over the held-out text.

    Arguments are those of :class:`TextBatches`; ``max_batches`` is per rank, and a short text has smaller batches.
    """

    def __init__(
        self, text: Tensor, *, batch_size: int, block_tokens: int, max_batches: int, rank: int = 0, world_size: int = 1
    ) -> None:
        inputs, labels = _cut_blocks(text, block_tokens)
        blocks_per_rank = len(inputs) // world_size
        if not blocks_per_rank:
            raise ValueError(
                f"the held-out text has {len(inputs)} blocks of {block_tokens} tokens, and {world_size} are needed, "
                "one for every rank: give a longer `text`."
            )
        batch_size = min(batch_size, blocks_per_rank)
        num_batches = min(max_batches, blocks_per_rank // batch_size)
        chosen = torch.linspace(0, len(inputs) - 1, num_batches * batch_size * world_size).long()
        chosen = chosen.view(world_size, num_batches, batch_size)[rank]
        super().__init__([inputs[blocks].long(), labels[blocks].long()] for blocks in chosen)


class TextData(pl.LightningDataModule):
    """Training and validation batches of a corpus; in a Trainer, this rank's part of them.

    The whole run is one epoch of ``num_batches``, over as many passes of the text as it takes, so that no accumulation
    window is cut at the end of a pass. Without a seed the order follows from torch's global one.
    """

    def __init__(self, corpus: Corpus, batch_size: int, num_batches: int, seed: int | None = None) -> None:
        super().__init__()
        self._corpus, self._batch_size, self._num_batches, self._seed = corpus, batch_size, num_batches, seed

    @override
    def train_dataloader(self) -> TextBatches:
        """All batches of the run."""
        seed = torch.initial_seed() % 2**32 if self._seed is None else self._seed
        return TextBatches(self._corpus.train, num_batches=self._num_batches, seed=seed, **self._part())

    @override
    def val_dataloader(self) -> HeldOutBatches:
        """At most 32 batches."""
        return HeldOutBatches(self._corpus.validation, max_batches=_MAX_VALIDATION_BATCHES, **self._part())

    def _part(self) -> dict[str, int]:
        # Ranks that hold parts of one copy of the model take the same part of every batch.
        sampler = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        part = {"rank": sampler["rank"], "world_size": sampler["num_replicas"]}
        return {"batch_size": self._batch_size, "block_tokens": BLOCK_TOKENS, **part}
