"""``lightning-mp consolidate``: a folder of shards as a single file."""

import argparse
from pathlib import Path

_DESCRIPTION = """\
Convert a sharded checkpoint, the folder that FSDP2Strategy, ModelParallelStrategy or FSDPStrategy writes, to a single
file that any strategy resumes from and torch.load reads. It runs in one process and holds the whole checkpoint in host
memory once. Everything except tensors is unpickled: use it only on folders that you trust."""

_EXAMPLES = """\
example:
  lightning-mp consolidate checkpoints/last.ckpt whole.ckpt"""


def fill_consolidate(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``consolidate`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("folder", type=Path, help="the checkpoint, with meta.pt and shards in it")
    parser.add_argument("file", type=Path, help="the new file; it must not exist yet")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_mp.training.checkpoints.consolidate import consolidate_checkpoint

    try:
        written = consolidate_checkpoint(arguments.folder, arguments.file)
    except ValueError as error:
        arguments.parser.error(str(error))
    print(f"{written}: {written.stat().st_size / 1e6:,.1f} MB")
    return 0
