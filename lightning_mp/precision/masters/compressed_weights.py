"""When the memory of fp32 parameters is given away, and when it is returned.

.. code-block:: text

    first window      parameters are fp32: forward shows whether it writes to its weights
    step              for one block at a time: join, fp32 gradients, the optimizer's step, split
    between steps     copies of 16 bits and their rests; whoever touches a parameter gets it joined
    next step         what was touched is split again before forward

An optimizer that evaluates the loss itself, or whose update needs all parameters, has all of them joined for its step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_mp.core import private_sharding_api
from lightning_mp.precision.masters.fp32_gradients import Fp32GradientEpilogue, Fp32Gradients
from lightning_mp.precision.masters.fp32_steps import Fp32Steps
from lightning_mp.precision.masters.lent_weights import LentWeights, Loan
from lightning_mp.precision.masters.split_parameters import (
    GatheredLoan,
    SplitLoan,
    SplitMemory,
    as_plain,
    is_split,
)

#: Of the rests, by the name of the storage.
REST_DTYPES = {"remainder": torch.int16, "24bit": torch.int8}


class CompressedParameters:
    """The parameters of a run that are split between steps.

    Args:
        rest_dtype: of their rests.
        loan_of: gives the loan of a parameter that an optimizer has; None if it is to stay fp32.
        steps: how many optimizer steps were taken before.
    """

    def __init__(
        self, rest_dtype: torch.dtype, loan_of: Callable[[Tensor], SplitLoan | None], *, steps: int = 0
    ) -> None:
        self._rest_dtype, self._loan_of = rest_dtype, loan_of
        self._memories: list[SplitMemory] = []
        #: How many optimizer steps were taken: rounding to 24 bits depends on it.
        self.steps = steps

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Makes room for the parameters of an optimizer that are to be split."""
        new: dict[torch.device, list[SplitLoan]] = {}
        for loan in map(self._loan_of, parameters):
            if loan is not None and loan.memory is None:
                new.setdefault(loan.local.device, []).append(loan)
        self._memories += [SplitMemory(loans, self._rest_dtype) for loans in new.values()]

    def join(self, parameters: Sequence[Tensor]) -> None:
        """Gives split parameters their numbers."""
        for memory in self._memories:
            memory.join(parameters if len(self._memories) == 1 else [p for p in parameters if memory.holds(p)])

    def compress(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Splits these, or all that are joined, and frees their memory."""
        for memory in self._memories:
            memory.steps = self.steps
            memory.compress(memory.loans if parameters is None else memory.loans_of(parameters))

    def as_plain(self) -> AbstractContextManager[None]:
        """Parameters are asked for gradients and sizes without a call for each. Nobody may read their numbers."""
        return as_plain([loan for memory in self._memories for loan in memory.loans])

    def end(self) -> None:
        """Leaves plain fp32 parameters."""
        for memory in self._memories:
            memory.join([loan.parameter for loan in memory.loans])
        self._memories = []
