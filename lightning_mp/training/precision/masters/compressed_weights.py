"""When the memory of fp32 parameters is given away, and when it is returned.

.. code-block:: text

    first window      parameters are fp32: forward shows whether it writes to its weights
    step              for one block at a time: join, fp32 gradients, the optimizer's step, split
    between steps     copies of 16 bits and their rests; access to a parameter joins it
    next step         what was touched is split again before forward

An optimizer that evaluates the loss itself, or whose update needs all parameters, has all of them joined for its step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api, private_module_api, private_tensor_api
from lightning_mp.training.gradients.gradient_ops import LocalGradients
from lightning_mp.training.precision.masters.fp32_gradients import Fp32GradientEpilogue, Fp32Gradients
from lightning_mp.training.precision.masters.fp32_steps import Fp32Steps
from lightning_mp.training.precision.masters.lent_weights import LentWeights, Loan
from lightning_mp.training.precision.masters.split_parameters import (
    SPLIT_CLASSES,
    GatheredLoan,
    SplitLoan,
    SplitMemory,
    as_plain,
)

# Of the rests, by the name of the storage.
_REST_DTYPES = {"remainder": torch.int16, "24bit": torch.int8}


class CompressedParameters:
    """The parameters of a run that are split between steps.

    Args:
        storage: "remainder" or "24bit".
        loan_of: gives the loan of a parameter that an optimizer has; None if it is to stay fp32.
        step_now: how many optimizer steps were taken, over all runs: rounding to 24 bits depends on it.
        prepare: called before the first training step.
    """

    def __init__(
        self,
        storage: str,
        loan_of: Callable[[Tensor], SplitLoan | None],
        step_now: Callable[[], int],
        *,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._rest_dtype, self._loan_of, self._step_now = _REST_DTYPES[storage], loan_of, step_now
        self._prepare = prepare
        self._has_begun = False
        self._expected: set[int] = set()
        self._memories: list[SplitMemory] = []
        self._loans: dict[int, SplitLoan | None] = {}  # by the parameter's id: the hash of a tensor is a call

    @property
    def loans(self) -> list[SplitLoan]:
        """Of all parameters that are, or will be, split."""
        return [loan for memory in self._memories for loan in memory.loans]

    def splits(self, parameter: Tensor) -> bool:
        """Whether a parameter was split in this run."""
        loan = self._loans.get(id(parameter))
        return loan is not None and loan.was_split

    def expect_split(self, parameters: Iterable[Tensor]) -> None:
        """Forward was seen in an earlier run not to write to these: they are split before the first step."""
        self._expected.update(map(id, parameters))

    def begin_step(self, optimizers: Iterable[Optimizer]) -> None:
        """Before a training step: makes room for the optimizers' parameters once, and splits again what was touched.

        Not earlier, because what loads a checkpoint gives parameters gradients of their own dtype.
        """
        if not self._has_begun:
            self._has_begun = True
            if self._prepare is not None:
                self._prepare()
            for optimizer in optimizers:
                self.take([p for group in optimizer.param_groups for p in group["params"]])
        for memory in self._memories:
            memory.compress([loan for loan in memory.loans if loan.was_split], self._step_now)

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Makes room for the parameters of an optimizer, once training has begun: loading makes steps, too."""
        if not self._has_begun:
            return
        new: dict[torch.device, list[SplitLoan]] = {}
        for parameter in [p for p in parameters if self._loans.get(id(p)) is None]:
            self._loans[id(parameter)] = loan = self._loan_of(parameter)
            if loan is not None:
                if id(parameter) in self._expected:
                    loan.is_seen = loan.was_split = True
                new.setdefault(loan.local.device, []).append(loan)
        self._memories += [SplitMemory(loans, self._rest_dtype) for loans in new.values()]

    def join(self, parameters: Iterable[Tensor]) -> None:
        """Gives split parameters their numbers."""
        for memory, loans in self._by_memory(parameters):
            memory.join(loans)

    def compress(self, parameters: Iterable[Tensor]) -> None:
        """Splits those that are joined, and frees their memory."""
        for memory, loans in self._by_memory(parameters):
            memory.compress(loans, self._step_now)

    def begin_window(self, window: int) -> None:
        """Copies of parameters that are joined from now on are right in it."""
        for memory in self._memories:
            memory.window = window

    def _by_memory(self, parameters: Iterable[Tensor]) -> list[tuple[SplitMemory, list[SplitLoan]]]:
        loans = [loan for p in parameters if (loan := self._loans.get(id(p))) is not None]
        return [(memory, [loan for loan in loans if loan.memory is memory]) for memory in self._memories]

    def as_plain(self) -> AbstractContextManager[None]:
        """Inside, gradients of split parameters are read without a call for each. Do not read their numbers."""
        return as_plain(self.loans)

    def release(self, loan: SplitLoan) -> None:
        """The parameter stays fp32."""
        self._loans.pop(id(loan.parameter), None)
        if loan.memory is not None:
            loan.memory.release(loan)

    def end(self) -> None:
        """Leaves plain fp32 parameters."""
        for memory in self._memories:
            memory.join(memory.loans)
        self._memories, self._loans = [], {}


def _memory_of(loan: Loan) -> SplitMemory | None:
    """None if no optimizer has the parameter."""
    return loan.memory if isinstance(loan, SplitLoan) else None


class CompressedWeights(LentWeights):
    """Lent copies that say, together with their rests, all about the parameters of optimizers."""

    def __init__(self, *args: Any, storage: str, step_now: Callable[[], int], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._step_now = step_now
        self.compressed = CompressedParameters(storage, self._loan_to_split, step_now, prepare=self._make_all_loans)

    def _make_all_loans(self) -> None:
        """Copies stay where they are from then on, as compiled code needs it."""
        compiled = private_dispatch_api.has_compiled_steps(self._model)
        for root in [self._model] if compiled else [call.module for call in self._calls]:
            self._places_of(root)

    def _loan_to_split(self, parameter: Tensor) -> SplitLoan | None:
        loan = self._loans.get(parameter)
        return loan if isinstance(loan, SplitLoan) else None

    @override
    def _make_loan(self, parameter: nn.Parameter) -> Loan:
        return SplitLoan(parameter, parameter.detach().to(self._dtype))

    @override
    def _forget(self, loan: Loan) -> None:
        if isinstance(loan, SplitLoan):
            self.compressed.release(loan)
        super()._forget(loan)

    @override
    def end_window(self) -> None:
        """After an optimizer step."""
        super().end_window()
        self.compressed.begin_window(self.window)

    @override
    def end(self) -> None:
        """Leaves plain fp32 parameters."""
        self.compressed.end()
        super().end()

    @override
    def _cast(self, loans: Sequence[Loan], versions: Sequence[int]) -> None:
        """The copies of split parameters are right; those of joined ones are rounded as splitting rounds."""
        joined = [
            (loan, version)
            for loan, version in zip(loans, versions, strict=True)
            if type(loan.parameter) not in SPLIT_CLASSES
        ]
        others = []
        for loan, version in joined:
            memory = _memory_of(loan)
            if memory is None or not isinstance(loan, SplitLoan):
                others.append((loan, version))
                continue
            memory.write(loan, self._step_now())
            if loan.version != version:  # a backward that still needs the old copy raises torch's error
                torch.autograd.graph.increment_version([loan.copy])
                loan.copy_version = private_tensor_api.version_of(loan.copy)
            loan.version, loan.window = version, self.window if self.is_trusted else -1
        if others:
            super()._cast([loan for loan, _ in others], [version for _, version in others])

    @override
    def _rounded(self, loan: Loan) -> Tensor:
        memory = _memory_of(loan)
        if memory is None or not isinstance(loan, SplitLoan):
            return super()._rounded(loan)
        local = memory.rounded(loan, self._step_now())
        return private_module_api.with_part(loan.copy, local) if isinstance(loan.copy, DTensor) else local

    @override
    def _check_writes(self, root: nn.Module, loans: Sequence[Loan]) -> None:
        """What forward has written to the copy of a split parameter is the truth."""
        with private_dispatch_api.without_function_modes():
            split = [loan for loan in loans if type(loan.parameter) in SPLIT_CLASSES]
            versions = private_tensor_api.versions_of([loan.copy for loan in split])
            for loan, version in zip(split, versions, strict=True):
                if version != loan.copy_version and isinstance(loan, SplitLoan) and loan.memory is not None:
                    loan.memory.forget_rest(loan)
        if not all(loan.is_seen for loan in loans if isinstance(loan, SplitLoan)):
            self._checked.discard(root)  # weights that it has got since its first call are to be compared as well
        super()._check_writes(root, loans)

    @override
    def _take_written(self, written: Sequence[Loan]) -> None:
        self.compressed.join([loan.parameter for loan in written])
        super()._take_written(written)

    @override
    def _differing(self, loans: Sequence[Loan]) -> list[Loan]:
        """Parameters that were seen may be split, and their copies are not rounded as casts round."""
        known = [loan for loan in loans if isinstance(loan, SplitLoan) and loan.is_seen]
        differing = super()._differing([loan for loan in loans if loan not in known])
        for loan in loans:
            if isinstance(loan, SplitLoan):
                loan.is_seen = True
        versions = private_tensor_api.versions_of([loan.copy for loan in known])
        written = [loan for loan, version in zip(known, versions, strict=True) if version != loan.copy_version]
        return [*differing, *written]


@contextmanager
def compressed_shards(
    module: nn.Module, dtype: torch.dtype, storage: str, step_now: Callable[[], int]
) -> Iterator[CompressedParameters]:
    """The same of the shards of FSDP2, which gathers copies instead of casting shards, for the time of a run.

    Raises:
        MisconfigurationException: if this release of torch keeps elsewhere what FSDP2 gathers.
    """
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    try:
        gathered = [shard for unit in units for shard in private_module_api.shards_gathered_in(unit, dtype)]
    except AttributeError as error:
        raise MisconfigurationException(
            f"MasterWeightsPrecision: storage='remainder' and '24bit' need an internal name of FSDP2 that torch"
            f" {torch.__version__} does not have ({error}). Use storage='fp32'."
        ) from None
    shards = {id(shard.sharded): shard for shard in gathered}

    def loan_of(parameter: Tensor) -> SplitLoan | None:
        shard = shards.get(id(parameter))
        return GatheredLoan(shard) if shard is not None else None

    def prepare() -> None:
        inner = {part for unit in units for part in unit.modules() if part is not unit}
        for unit in units:
            if unit not in inner:
                private_module_api.make_ready(unit)

    compressed = CompressedParameters(storage, loan_of, step_now, prepare=prepare)
    try:
        yield compressed
    finally:
        compressed.end()
        for shard in gathered:
            shard.end()


class CompressedSteps(Fp32Steps):
    """Optimizer steps in which one block of parameters at a time is joined."""

    def __init__(self, optimizer: Optimizer, gradients: Fp32Gradients, compressed: CompressedParameters) -> None:
        super().__init__(optimizer, gradients)
        self._compressed = compressed

    @override
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._whole:
            self._compressed.take([p for group in optimizer.param_groups for p in group["params"]])
        super()._before_step(optimizer, args, kwargs)

    @override
    def _blocks(self) -> list[list[list[Tensor]]]:
        with self._compressed.as_plain():
            return super()._blocks()

    @override
    def _begin_block(self, parameters: list[Tensor]) -> None:
        with self._compressed.as_plain():
            stepped = [p for p in parameters if p.grad is not None]
        self._compressed.join(stepped)
        for parameter in stepped:
            gradient = parameter.grad
            # Autograd takes the layout of gradients from the parameter, which had no memory. Kernels of torch.optim
            # read both as they lie.
            if gradient is not None and gradient.stride() != parameter.stride() and not gradient.is_sparse:
                like = torch.empty_like(parameter, dtype=gradient.dtype)
                parameter.grad = like.copy_(gradient)
        super()._begin_block(stepped)

    @override
    def _end_block(self, parameters: list[Tensor]) -> None:
        super()._end_block(parameters)
        self._compressed.compress(parameters)


class CompressedEpilogue(Fp32GradientEpilogue):
    """Reads the gradients of split parameters without a call for each."""

    def __init__(self, compressed: CompressedParameters, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compressed = compressed

    @override
    def _read(self) -> LocalGradients:
        with self._compressed.as_plain():
            return super()._read()
