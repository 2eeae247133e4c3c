"""Which optimizers step block by block, and the blocks.

fp32 copies of 16-bit gradients, and masters that are put together for a step, take 4 bytes per parameter each. Stepped
in blocks, an optimizer needs them for one block at a time. Numbers are those of one block, to the bit.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.training.gradients.gradient_ops import local_shard

#: The update of a parameter by one of these depends on its own gradient and state, and on nothing else.
SEPARABLE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD"),
        *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)

#: A block has at most this share of the parameters, or ``_SMALLEST_BLOCK`` of them, or is one parameter.
BLOCK_SHARE = 1 / 32
_SMALLEST_BLOCK = 16 * 2**20  # 64 MiB in fp32


def step_blocks(optimizer: Optimizer) -> list[list[list[Tensor]]]:
    """The parameters with a gradient in blocks, each as one list per group; no blocks where it steps at once."""
    if type(optimizer) not in SEPARABLE or any(group.get("differentiable") for group in optimizer.param_groups):
        return []
    groups = [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    sizes = [[local_shard(p.detach()).numel() for p in members] for members in groups]
    total = sum(map(sum, sizes))
    limit = max(_SMALLEST_BLOCK, BLOCK_SHARE * total)
    if total <= limit:
        return []
    blocks: list[list[list[Tensor]]] = []
    room = 0.0
    for index, (members, numbers) in enumerate(zip(groups, sizes, strict=True)):
        for parameter, size in zip(members, numbers, strict=True):
            if not blocks or size > room:
                blocks.append([[] for _ in groups])
                room = limit
            blocks[-1][index].append(parameter)
            room -= size
    return blocks


# Kernels over lists of tensors read and write 16 bytes at once where memory is aligned.
_ALIGNMENT = 64


def padded(numel: int) -> int:
    """Elements for which there is room in the memory of a block, for a parameter of as many.

    >>> padded(65)
    128
    """
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
