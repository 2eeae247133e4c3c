"""The shape of a decoder on the command line, for ``plan`` and ``memory``."""

import argparse
from typing import Any

from lightning_mp.ground.core.quantities import parse_bytes, parse_quantity
from lightning_mp.planning.memory.decoder_config import DecoderConfig

_SHAPE = ("layers", "width", "vocabulary", "heads", "kv_heads", "head_width", "ffn_width", "experts", "active_experts")
_CONTEXT_TOKENS = 4096
_FEWEST = 1000


def add_shape(group: "argparse._ArgumentGroup") -> None:
    """Adds the options."""
    group.add_argument("--config", metavar="FILE", help="config.json of a Hugging Face model")
    group.add_argument("--layers", metavar="L", help="number of blocks")
    group.add_argument("--width", metavar="W", help="width of the residual stream")
    group.add_argument("--vocab", metavar="V", dest="vocabulary", help="vocabulary size")
    group.add_argument("--heads", metavar="H", help="query heads; default: width / 128")
    group.add_argument("--kv-heads", metavar="K", help="key and value heads; default: as many as --heads")
    group.add_argument("--head-width", metavar="S", help="width of one head; default: width / heads")
    group.add_argument("--ffn", metavar="F", dest="ffn_width", help="hidden width of the MLP; default: 8/3 of width")
    group.add_argument("--experts", metavar="E", help="experts of a mixture-of-experts model")
    group.add_argument("--active-experts", metavar="A", help="experts per token; default 2")
    group.add_argument("--tied-head", action="store_true", help="the output layer shares the token embedding")


def config_of(arguments: argparse.Namespace) -> DecoderConfig | None:
    """The decoder that the options describe; None without such options."""
    shape = {name: getattr(arguments, name) for name in _SHAPE if getattr(arguments, name) is not None}
    if arguments.tied_head and (arguments.config is not None or not shape):
        raise ValueError("--tied-head belongs to a shape (`layers`, `width`, `vocabulary`). Leave it out.")
    if arguments.config is not None:
        if shape:
            raise ValueError(f"`{next(iter(shape))}` is in the file of --config. Leave one of the two out.")
        return DecoderConfig.from_hugging_face(arguments.config)
    if not shape:
        return None
    missing = [name for name in ("layers", "width", "vocabulary") if name not in shape]
    if missing:
        raise ValueError(f"The shape of a model needs `layers`, `width` and `vocabulary`, got no `{missing[0]}`.")
    numbers: dict[str, Any] = {name: count_of(text, name) for name, text in shape.items()}
    return DecoderConfig(**numbers, tied_head=arguments.tied_head)


def context_of(text: str | None, config: DecoderConfig | None) -> int:
    """The length of a sequence; where none was written 4096, or as much as a model with learned positions takes."""
    if text is not None:
        return count_of(text, "context_tokens")
    longest = 0 if config is None else config.positions
    return min(_CONTEXT_TOKENS, longest or _CONTEXT_TOKENS)


def count_of(text: str | None, name: str) -> int:
    """A whole number; 1 where nothing was written."""
    value = parse_quantity(text if text is not None else 1, name)
    if value != int(value):
        raise ValueError(f"`{name}` must be a whole number, got {text!r}.")
    return int(value)


def refuse_other_units(text: str | None, name: str) -> None:
    """Parameters and tokens are counted one by one."""
    if text is not None and parse_quantity(text, name) < _FEWEST:
        raise ValueError(
            f"`{name}` must be at least {_FEWEST:,}, got {text!r}. For billions write {text.strip()}B,"
            f" for millions {text.strip()}M."
        )


def memory_of(text: str | None) -> float | None:
    """Bytes of one device; None where nothing was written."""
    if text is None:
        return None
    size = parse_bytes(text, "memory_bytes")
    if size < 1e6:
        raise ValueError(f"`memory_bytes` of {text!r} is less than a megabyte. Write {text.strip()}GB for gigabytes.")
    return size
