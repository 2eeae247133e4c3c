"""fp32 parameters whose memory is freed between steps, and restored on access.

Modules compute with a parameter's bf16 copy (:mod:`~lightning_mp.training.precision.masters.lent_weights`). The copy
and a rest of 16 or 8 bits say all about the parameter (:mod:`~lightning_mp.training.precision.masters.split_numbers`),
so that its own memory can be freed:

.. code-block:: text

    joined    a plain nn.Parameter with fp32 numbers: the truth; its copy is cast from it
    split     a parameter of a class whose __torch_function__ joins it when anything asks for its numbers; until then
              copy and rest are the truth

There is one truth at each time, so no version is compared and no write is lost. While a joined parameter's memory is
held by something else as well (a view, an array of numpy), it stays joined.

One kind of access escapes: what torch does in C++ without ``__torch_function__`` finds nan to read, and an error where
it writes. Known are transforms of torch.func that take a bare parameter as their argument.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api, private_module_api, private_tensor_api
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.training.gradients.step_blocks import padded
from lightning_mp.training.precision.masters.lent_weights import Loan
from lightning_mp.training.precision.masters.split_numbers import SplitNumbers

#: In the place of functions that are not here, slower and never wrong: the parameter is joined.
_READS_NO_NUMBERS = private_module_api.functions_that_read_no_numbers()
_LOAN = "lightning_mp_loan"  # attribute of a split parameter
_START = attrgetter("start")


class SplitParameter(nn.Parameter):
    """A parameter without memory. When it is touched, the object becomes the plain parameter that it was."""

    @classmethod
    @override
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Joins the split parameters among the arguments, if the function reads numbers, and calls it."""
        with private_dispatch_api.without_function_subclasses():
            if function not in _READS_NO_NUMBERS:
                for value in tensors_in((args, kwargs)):
                    if type(value) is SplitParameter:
                        _join(value)
            return function(*args, **(kwargs or {}))

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _join(self)
        return self.__deepcopy__(memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        _join(self)
        return self.__reduce_ex__(protocol)


class SplitShard(private_module_api.WatchedShard):
    """The same of a DTensor, which torch touches by its local part alone."""

    __slots__ = ()
    __deepcopy__, __reduce_ex__ = SplitParameter.__deepcopy__, SplitParameter.__reduce_ex__

    @override
    def touched(self) -> None:
        """Joins it."""
        _join(self)


_JOINED: dict[type, type] = {SplitParameter: nn.Parameter, SplitShard: DTensor}
_SPLIT = {joined: split for split, joined in _JOINED.items()}
#: The classes of parameters of which copy and rest are the truth.
SPLIT_CLASSES = frozenset(_JOINED)


def _join(parameter: Tensor) -> None:
    loan = vars(parameter)[_LOAN]
    loan.memory.join((loan,))


def _local(tensor: Tensor) -> Tensor:
    return private_module_api.part_of(tensor) if isinstance(tensor, DTensor) else tensor


class SplitLoan(Loan):
    """A parameter and its copy, and where the copy and the rest lie in memory that many share."""

    __slots__ = ("end", "is_seen", "memory", "shape", "start", "strides", "was_split")

    def __init__(self, parameter: nn.Parameter, copy: Tensor) -> None:
        super().__init__(parameter, copy)
        local = _local(copy)
        self.shape, self.strides = local.shape, local.stride()
        self.memory: SplitMemory | None = None  # None until an optimizer has it
        self.start = self.end = 0
        #: Forward was seen not to write to the copy, so that the parameter may be split.
        self.is_seen = False
        self.was_split = False

    @property
    def local(self) -> Tensor:
        """The parameter, or this rank's part of it."""
        return _local(self.parameter)

    @property
    def room(self) -> int:
        """For how many numbers there has to be memory."""
        return self.local.numel()

    @property
    def is_shared(self) -> bool:
        """Whether something else holds the parameter's memory."""
        return private_module_api.shares_memory(self.local)

    def move_copy(self, high: Tensor) -> None:
        """The copy lies in memory that many share from now on."""
        leaf = self.lent if self.lent is not None and self.lent.is_leaf else None
        local = high.as_strided(self.shape, self.strides, self.start).data  # with a version of its own
        local.copy_(_local(self.copy))
        self.renew(private_module_api.with_part(self.copy, local) if isinstance(self.copy, DTensor) else local)
        if leaf is not None:
            leaf.data, self.lent = self.copy, leaf  # DDP has hooked it

    def give(self, part: Tensor, row: Tensor, at: int) -> None:
        """Points the parameter, or this rank's part of it, to other memory.

        ``row`` has, from ``at``, the numbers that are computed with: those of the part, or of the copy.
        """
        if isinstance(self.parameter, DTensor):
            private_module_api.set_part(self.parameter, part)
        else:
            self.parameter.data = part


class GatheredLoan(SplitLoan):
    """A shard of FSDP2, which gathers the copy instead of casting the shard."""

    __slots__ = ("fsdp", "users")

    def __init__(self, fsdp: private_module_api.GatheredShard) -> None:
        super().__init__(fsdp.sharded, fsdp.sharded.detach())
        self.fsdp = fsdp
        self.is_seen = self.was_split = True  # there is no forward to watch
        self.users = 0

    @property
    @override
    def room(self) -> int:
        """With what makes the parts of all ranks equal."""
        return self.fsdp.numel

    @property
    @override
    def is_shared(self) -> bool:
        """FSDP2 holds it, too."""
        return private_module_api.users_of_memory(self.local) > self.users

    @override
    def move_copy(self, high: Tensor) -> None:
        """No operation uses a separate copy of it."""
        self.renew(high[:0])
        self.users = private_module_api.users_of_memory(self.local)

    @override
    def give(self, part: Tensor, row: Tensor, at: int) -> None:
        """Also to FSDP2, for gathering."""
        super().give(part, row, at)
        self.fsdp.gather(row[at : at + self.room])


_Run = list[SplitLoan]  # neighbours in memory


class SplitMemory:
    """Copies and rests of many parameters on one device, contiguous in memory: few kernels join or split them all.

    Args:
        loans: of the parameters, which are joined.
        rest_dtype: ``torch.int16``, or ``torch.int8`` for parameters of 24 bits.
    """

    def __init__(self, loans: Sequence[SplitLoan], rest_dtype: torch.dtype) -> None:
        end = 0
        for loan in loans:
            loan.memory, loan.start, end = self, end, end + padded(loan.room)
            loan.end = end
        device = loans[0].local.device
        self.split = SplitNumbers(end, rest_dtype, device)
        self._nothing = torch.full((), torch.nan, device=device)
        private_module_api.refuse_writes(self._nothing)
        #: In which copies of parameters that are joined now are right, until these are written to.
        self.window = 0
        self._joined: list[tuple[_Run, Tensor, int]] = []  # with their numbers, and how many held these
        self.loans = list(loans)
        for loan in loans:
            loan.move_copy(self.split.high)

    def join(self, loans: Iterable[SplitLoan]) -> None:
        """Gives those parameters that are split their numbers."""
        for run in _neighbours([loan for loan in loans if type(loan.parameter) in _JOINED]):
            start, end = run[0].start, run[-1].end
            with private_module_api.unnoticed():
                numbers = self.split.join(start, end)
                for loan in run:
                    parameter, at = loan.parameter, loan.start - start
                    parameter.__class__ = _JOINED[type(parameter)]
                    del vars(parameter)[_LOAN]
                    loan.give(numbers.as_strided(loan.shape, loan.strides, at), numbers, at)
                    loan.window = self.window
            self._joined.append((run, numbers, private_module_api.users_of_memory(numbers)))

    def write(self, loan: SplitLoan, step: int) -> None:
        """Writes the copy and the rest of a parameter that keeps its numbers."""
        with private_module_api.unnoticed():
            self.split.split(self._row_of(loan), loan.start, step)

    def rounded(self, loan: SplitLoan, step: int) -> Tensor:
        """What :meth:`write` makes of the parameter, or this rank's part of it: its copy."""
        with private_module_api.unnoticed():
            alone = SplitNumbers(loan.end - loan.start, self.split.rest.dtype, self._nothing.device)
            alone.split(self._row_of(loan), 0, step)
            return alone.high.as_strided(loan.shape, loan.strides)

    def _row_of(self, loan: SplitLoan) -> Tensor:
        numbers = torch.zeros(loan.end - loan.start, device=self._nothing.device)
        numbers.as_strided(loan.shape, loan.strides).copy_(loan.local)
        return numbers

    def forget_rest(self, loan: SplitLoan) -> None:
        """The copy is all of a split parameter: forward has written to it."""
        self.split.rest[loan.start : loan.end].zero_()

    def release(self, loan: SplitLoan) -> None:
        """The parameter is joined, and stays so."""
        self.join((loan,))
        self.loans.remove(loan)
        loan.memory = None

    def compress(self, loans: Iterable[SplitLoan], step_now: Callable[[], int]) -> None:
        """Splits the joined parameters among these, and frees their memory unless something else holds it as well.

        ``step_now`` tells how many optimizer steps were taken, which rounding to 24 bits depends on. It may wait for
        the device, and is not called if there is nothing to split.
        """
        wanted = {id(loan): loan for loan in loans if loan.is_seen and type(loan.parameter) in _SPLIT}
        if not wanted:
            return
        step = step_now()
        with private_module_api.unnoticed():
            free = self._split_runs(wanted, step)
            for loan in wanted.values():  # not split before, or given other memory since
                if not loan.is_shared:
                    self.write(loan, step)
                    free.append(loan)
            for loan in free:
                loan.give(self._nothing.expand(loan.shape), self.split.high, loan.start)
            # A graph that still needs the old numbers raises torch's error.
            weights, copies = [loan.parameter for loan in free], [loan.copy for loan in free]
            torch.autograd.graph.increment_version([*[weight.detach() for weight in weights], *copies])
            versions = zip(private_tensor_api.versions_of(weights), private_tensor_api.versions_of(copies), strict=True)
            for loan, (version, copy_version) in zip(free, versions, strict=True):
                parameter = loan.parameter
                loan.version, loan.copy_version, loan.was_split = version, copy_version, True
                vars(parameter)[_LOAN] = loan
                parameter.__class__ = _SPLIT[type(parameter)]

    def _split_runs(self, wanted: dict[int, SplitLoan], step: int) -> _Run:
        """Splits what was joined together and is wanted, and returns it; ``wanted`` keeps what was not."""
        free: _Run = []
        kept: list[tuple[_Run, Tensor, int]] = []
        for run, numbers, users in self._joined:
            start, at = run[0].start, numbers.data_ptr()
            parts = [loan.local if loan.is_sharded else loan.parameter for loan in run]
            there = [
                loan
                for loan, part in zip(run, parts, strict=True)
                if part.data_ptr() == at + 4 * (loan.start - start) or part.numel() == 0  # which is nowhere
            ]
            del parts  # or they would be counted among what holds the numbers
            elsewhere = len(run) - len(there)
            is_held = private_module_api.users_of_memory(numbers) > users - elsewhere
            if is_held or [loan for loan in there if id(loan) not in wanted]:
                kept.append((run, numbers, users))
                for loan in there:
                    wanted.pop(id(loan), None)
                    loan.window = -1  # what holds the numbers may write to them without a trace
            elif not elsewhere:
                self.split.split(numbers, start, step)
                free += [wanted.pop(id(loan)) for loan in run]
            else:
                for loan in there:
                    self.write(loan, step)
                    free.append(wanted.pop(id(loan)))
        self._joined = kept
        return free


def _neighbours(loans: Sequence[SplitLoan]) -> list[_Run]:
    """Those that are contiguous in memory."""
    runs: list[_Run] = []
    for loan in sorted(loans, key=_START):
        if runs and runs[-1][-1].end == loan.start:
            runs[-1].append(loan)
        else:
            runs.append([loan])
    return runs


@contextmanager
def as_plain(loans: Iterable[Loan]) -> Iterator[None]:
    """Inside, gradients and sizes of split parameters are read without a call for each. Do not read their numbers."""
    split = [(loan.parameter, type(loan.parameter)) for loan in loans if type(loan.parameter) in _JOINED]
    for parameter, kind in split:
        parameter.__class__ = _JOINED[kind]
    try:
        yield
    finally:
        for parameter, kind in split:
            parameter.__class__ = kind
