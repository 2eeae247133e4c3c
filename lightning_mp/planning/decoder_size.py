"""The weights of a decoder, by what a parallel layout does with them."""

from dataclasses import dataclass

from lightning_mp.core.arguments import whole_number


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """How many weights a decoder has, and where.

    Raises:
        ValueError: a number is negative, or there are no layers or no width.

    Example:
        Llama 2 7B: 4 w^2 of attention and 3 w 11008 of the MLP in a block.

        >>> size = DecoderSize.of(6_738_415_616, layers=32, width=4096, vocabulary=32000)
        >>> size.block_matmul_weights == 4 * 4096**2 + 3 * 4096 * 11008, size.other_weights, size.parameters
        (True, 4096, 6738415616)
    """

    layers: int  #: Number of blocks.
    width: int  #: Size of the residual stream.
    vocabulary: int  #: Number of token ids.
    block_matmul_weights: int  #: Of one block: those in matrix products.
    block_norm_weights: int  #: Of one block: those of its norms.
    table_weights: int  #: The token table; the output layer as well if it is tied to it.
    head_weights: int = 0  #: The output layer, if it is not tied.
    other_weights: int = 0  #: Outside of the blocks: last norm, positions.
    unrouted_weights: int = 0  #: Of all blocks: those of experts that a token is not routed to.

    def __post_init__(self) -> None:
        for name in self.__slots__:
            minimum = 1 if name in ("layers", "width", "vocabulary") else 0
            whole_number(getattr(self, name), name, "DecoderSize", minimum=minimum)

    @classmethod
    def of(cls, parameters: int, *, layers: int, width: int, vocabulary: int, tied_head: bool = False) -> "DecoderSize":
        """From published sizes of a model: two norms of one vector per block, one after the last, no biases.

        Weights that remain after embeddings and norms are divided among the blocks.

        Raises:
            ValueError: embeddings and norms alone have more than ``parameters``.
        """
        for name, value in (("layers", layers), ("width", width), ("vocabulary", vocabulary)):
            whole_number(value, name)
        table = vocabulary * width
        head = 0 if tied_head else table
        norms = 2 * width
        left = int(parameters) - table - head - width - layers * norms
        if left < layers:
            raise ValueError(
                f"`parameters` ({int(parameters)}) leaves nothing for {layers} blocks: a vocabulary of {vocabulary} and"
                f" a width of {width} take {table + head + width + layers * norms}. Check the numbers."
            )
        return cls(layers, width, vocabulary, left // layers, norms, table, head, width + left % layers)

    @property
    def parameters(self) -> int:
        """Total number of weights, a tied head counted once."""
        blocks = self.layers * (self.block_matmul_weights + self.block_norm_weights)
        return blocks + self.table_weights + self.head_weights + self.other_weights

    @property
    def matmul_weights(self) -> int:
        """The N of the FLOPs conventions: blocks and output layer; in a mixture, those that a token is routed to."""
        head = self.head_weights or self.table_weights
        return self.layers * self.block_matmul_weights + head - self.unrouted_weights
