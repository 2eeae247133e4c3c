"""How GPUs are divided: data, sharding, tensor and pipeline parallelism."""

from dataclasses import dataclass

from lightning_mp.core.arguments import whole_number


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes whose product is the number of GPUs. Ranks that share a layer are neighbours.

    From near to far: tensor parallel, shards, copies, stages. :class:`~lightning_mp.strategies.FSDP2Strategy` lays
    ranks out in this order; for stages it is Megatron-LM's.

    Raises:
        ValueError: a size is not a positive integer, or stages are sharded.

    Example:
        >>> ParallelLayout(shards=8, copies=4).gpus, ParallelLayout(tensor=8, shards=16).name
        (32, 'FSDP 16 x TP 8')
    """

    #: Of the model, or of its shards: ranks that hold the same weights and see other data. DDP; the outer part of
    #: hybrid sharding.
    copies: int = 1
    shards: int = 1  #: Over how many ranks weights, gradients and optimizer states are sharded (FSDP).
    tensor: int = 1  #: Over how many ranks each layer is split (TP).
    stages: int = 1  #: Of a pipeline (PP).

    def __post_init__(self) -> None:
        for name in self.__slots__:
            whole_number(getattr(self, name), name, "ParallelLayout")
        if self.stages > 1 and self.shards > 1:
            raise ValueError(
                f"ParallelLayout(stages={self.stages}, shards={self.shards}): stages of a pipeline hold whole weights"
                " here, because FSDP would gather them again for every micro-batch. Use copies in place of shards."
            )

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.copies * self.shards * self.tensor * self.stages

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different data."""
        return self.copies * self.shards

    @property
    def name(self) -> str:
        """A short name: "DDP 8", "FSDP 8", "HSDP 4 x 8", "FSDP 4 x TP 8", "DDP 2 x PP 4"."""
        if self.shards == 1:
            data = f"DDP {self.copies}" if self.copies > 1 else ""
        else:
            data = f"HSDP {self.copies} x {self.shards}" if self.copies > 1 else f"FSDP {self.shards}"
        tensor = f"TP {self.tensor}" if self.tensor > 1 else ""
        stages = f"PP {self.stages}" if self.stages > 1 else ""
        return " x ".join(part for part in (data, tensor, stages) if part) or "one GPU"
