"""16-bit copies of fp32 weights, lent to modules for the time of a call.

Parameters stay fp32 for all code but the inside of a module call: steps, hooks, callbacks and optimizers see nothing
else. While a module runs that was called from outside of any other, copies of its weights are in place of its
parameters:

.. code-block:: text

    window begins     the first call of a module casts its weights, all in one kernel where torch can
    module call       copies are in ``module._parameters``; inner calls find them there
    backward          the copy's node returns the 16-bit gradient as it is: parameter.grad is 16 bit (``grad_dtype``)
    step              the optimizer gets fp32 gradients, and changes the parameters; the next window casts again

A copy is the output of an autograd function of its parameter, so hooks of parameters, ``autograd.grad`` and toggled
parameters work as they do without it. DDP hooks leaves and makes its buckets of their dtype, so there the copies are
leaves, and their gradients are handed to the parameters after each backward.

What no copy reaches (functional calls, weights that a list or a method uses, frozen weights, buffers) is cast by
autocast where it is used: slower, and equal.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api, private_module_api, private_tensor_api
from lightning_mp.ground.core.messages import listed
from lightning_mp.training.gradients.gradient_ops import local_shard


class _Lend(torch.autograd.Function):
    """The copy as a function of its parameter. It saves nothing, so one node serves all backwards."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is nothing to save, but torch.func requires this method."""

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Loan:
    """One parameter and its 16-bit copy."""

    __slots__ = ("copy", "copy_version", "is_sharded", "lent", "parameter", "plain", "version", "window")

    def __init__(self, parameter: nn.Parameter, copy: Tensor) -> None:
        self.parameter = parameter
        self.is_sharded = isinstance(parameter, DTensor)
        self.renew(copy)
        self.lent: Tensor | None = None  # the copy as a function of the parameter, or as a leaf

    def renew(self, copy: Tensor) -> None:
        """Another tensor becomes the copy; it is cast before it is lent."""
        self.copy = copy
        self.plain = copy.detach()  # for times in which the parameter needs no gradient
        self.lent = None
        self.window, self.version = -1, -1
        self.copy_version = private_tensor_api.version_of(copy)

    def connect(self) -> Tensor:
        """The copy as a function of the parameter: the same node for the rest of the run, as compiled code needs it."""
        with torch.inference_mode(False), torch.enable_grad():
            lent: Tensor = _Lend.apply(self.parameter, self.copy)  # type: ignore[no-untyped-call]
        self.lent = lent
        return lent

    def become_leaf(self) -> None:
        """DDP is to hook the copy itself."""
        self.lent = nn.Parameter(self.copy)

    @property
    def now(self) -> Tensor:
        """What the copy is, whatever forward has made of it."""
        return self.copy if self.lent is None else self.lent.detach()


_Place = tuple[Any, Any, Loan]  # a module's dictionary or list of weights, the key in it, and what is lent there


class LentWeights:
    """The copies of one model's weights, for one run.

    Args:
        model: its modules are called in steps.
        dtype: of the copies, fp16 or bf16.
        device_type: of the autocast that steps run under.
        in_float32: modules whose own weights are not lent.
        set_grad_dtype: let gradients be of the dtype of the copies; False lets autograd widen them.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device_type: str,
        in_float32: Collection[nn.Module] = (),
        *,
        set_grad_dtype: bool = True,
    ) -> None:
        self._model, self._dtype, self._in_float32 = model, dtype, in_float32
        self.device_type = device_type
        self._grad_dtype = dtype if set_grad_dtype else None
        self._loans: dict[Tensor, Loan] = {}
        self._written: set[Tensor] = set()  # forward writes to them: they are not lent
        self._places: dict[nn.Module, tuple[list[_Place], list[Loan], list[Tensor]]] = {}
        self._known: list[_Place] | None = None
        self._checked: set[nn.Module] = set()
        #: Raised by each optimizer step.
        self.window = 0
        #: Whether a module that is called now gets its copies; "lent" inside of one that has them.
        self.is_open: bool | Literal["lent"] = False
        self._in_place: list[_Place] = []  # where copies are now
        #: Whether copies that were cast in this window are right while their parameters' versions stay. That is so
        #: in a step of automatic optimization. Elsewhere weights may be written through ``.data`` between two
        #: forwards (averages swapped in for a validation, SAM by hand), which leaves no trace.
        self.is_trusted = False
        #: Copies are leaves, because DDP hooks them.
        self.has_leaves = False
        self._calls = [_LendingCall(self, module) for module in dict.fromkeys(_called_from_outside(model))]

    @property
    def loans(self) -> Collection[Loan]:
        """All that were made so far."""
        return self._loans.values()

    @contextmanager
    def opened(self, *, trusted: bool) -> Iterator[None]:
        """For the time of a step: modules that are called in it get copies."""
        before, self.is_open, self.is_trusted = (self.is_open, self.is_trusted), True, trusted
        try:
            yield
        finally:
            self.is_open, self.is_trusted = before

    def warn_about_late_compilation(self) -> None:
        """Before the first training step: modules that were compiled since set-up are called past this object."""
        names = [f"'{name}'" for name in _compiled_since(self._model)]
        if names:
            rank_zero_warn(
                f"MasterWeightsPrecision: {listed(names)} was compiled after set-up and gets no 16-bit copies: fp32"
                " weights are cast at each use, which is slower. Compile in __init__, setup or configure_model."
            )

    @contextmanager
    def lending(self, root: nn.Module) -> Iterator[None]:
        """Copies are in place of a module's weights; cast again where they may be too old."""
        with private_dispatch_api.without_function_modes():  # a policy's mode sees each access to a tensor's attributes
            places, loans = self._places_of(root)
            self._cast_again(loans)
            put = self._put_in_place(root, places)
        with self._lent(put):
            yield
        self._check_writes(root, loans)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Activation checkpoints compute again with the copies of their forward, as these are."""
        with private_dispatch_api.without_function_modes():
            put = self._put_in_place(self._model, self._known_places())
        with self._lent(put):
            yield

    @contextmanager
    def _lent(self, put: list[_Place]) -> Iterator[None]:
        before = self.is_open, self._in_place
        self.is_open, self._in_place = "lent", put
        try:
            yield
        finally:
            self.is_open, self._in_place = before
            for held, key, loan in put:
                held[key] = loan.parameter

    @contextmanager
    def returned(self, module: nn.Module) -> Iterator[None]:
        """A module inside of another one has its fp32 parameters again, and so has what it calls."""
        with private_dispatch_api.without_function_modes():
            held_by_it = {id(held) for part in module.modules() for held in private_module_api.holders_of_weights(part)}
        places = [place for place in self._in_place if id(place[0]) in held_by_it]
        copies = [held[key] for held, key, _ in places]
        for held, key, loan in places:
            held[key] = loan.parameter
        before, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = before
            for (held, key, _), copy in zip(places, copies, strict=True):
                held[key] = copy

    def end_window(self) -> None:
        """After an optimizer step."""
        self.window += 1

    def end(self) -> None:
        """Leaves plain fp32 parameters."""
        for call in self._calls:
            call.remove()
        for loan in self._loans.values():
            private_module_api.set_grad_dtype(loan.parameter, loan.parameter.dtype)

    # -- casts ---------------------------------------------------------------------------------------------------------

    def _cast_again(self, loans: Sequence[Loan]) -> None:
        versions = private_tensor_api.versions_of([loan.parameter for loan in loans])
        old = [
            (loan, version)
            for loan, version in zip(loans, versions, strict=True)
            if loan.version != version or loan.window != self.window or not self.is_trusted
        ]
        if old:
            self._cast([loan for loan, _ in old], [version for _, version in old])

    @torch.no_grad()
    def _cast(self, loans: Sequence[Loan], versions: Sequence[int]) -> None:
        """Writes copies of parameters; ``versions`` are those that the parameters have now."""
        with torch.inference_mode(False):
            # A copy whose version moves raises torch's error in a backward that still needs the old one. A parameter
            # that was written through `.data` raises none there, as in fp32.
            into = [
                loan.copy if loan.version != version else loan.copy.data
                for loan, version in zip(loans, versions, strict=True)
            ]
        weights: list[Tensor] = [loan.parameter for loan in loans]
        if [loan for loan in loans if loan.is_sharded]:
            into, weights = [local_shard(t) for t in into], [local_shard(t) for t in weights]
        private_tensor_api.foreach_copy_(into, weights)
        window = self.window if self.is_trusted else -1
        copy_versions = private_tensor_api.versions_of([loan.copy for loan in loans])
        for loan, version, copy_version in zip(loans, versions, copy_versions, strict=True):
            loan.window, loan.version, loan.copy_version = window, version, copy_version

    def _put_in_place(self, root: nn.Module, places: Sequence[_Place]) -> list[_Place]:
        put = []
        for place in places:
            held, key, loan = place
            try:
                as_before = held[key] is loan.parameter
            except LookupError:
                as_before = False
            if not as_before:  # a functional_call has brought its own, or the parameter was replaced
                self._places.pop(root, None)
                self._known = None
                continue
            copy = loan.lent if loan.parameter.requires_grad else loan.plain
            held[key] = copy if copy is not None else loan.connect()
            put.append(place)
        return put

    # -- which weights are lent ----------------------------------------------------------------------------------------

    def _places_of(self, root: nn.Module) -> tuple[list[_Place], list[Loan]]:
        found = self._places.get(root)
        if found is not None:
            places, loans, others = found
            # Moved or replaced by `.data =`, or unfrozen, since they were looked up.
            moved = [
                loan
                for loan in loans
                if loan.copy.device != loan.parameter.device
                or loan.copy.shape != loan.parameter.shape
                or loan.parameter.dtype != torch.float32
            ]
            if not moved and not [p for p in others if p.requires_grad]:
                return places, loans
            for loan in moved:
                self._forget(loan)
        is_complete = True
        places, others = [], []
        for module in root.modules():
            if module in self._in_float32:
                continue
            for held, key, parameter in private_module_api.places_of_weights(module):
                if is_lazy(parameter):
                    is_complete = False  # type: ignore[unreachable]  # it narrows to what is no parameter
                elif parameter in self._loans or self._takes(parameter):
                    places.append((held, key, self._loan(parameter)))
                elif not parameter.requires_grad and parameter not in self._written:
                    others.append(parameter)
        loans = list(dict.fromkeys(loan for _, _, loan in places))
        if is_complete:
            self._places[root] = places, loans, others
        return places, loans

    def _known_places(self) -> list[_Place]:
        """The places of all weights that were lent so far."""
        if self._known is None:
            self._known = [
                (held, key, self._loans[weight])
                for module in self._model.modules()
                if module not in self._in_float32
                for held, key, weight in private_module_api.places_of_weights(module)
                if weight in self._loans
            ]
        return self._known

    def _takes(self, parameter: Tensor) -> bool:
        """Subclasses of tensors are not lent: they define their own operations."""
        is_plain = type(parameter) is nn.Parameter or isinstance(parameter, DTensor)
        is_trained = parameter.dtype == torch.float32 and parameter.requires_grad
        return is_plain and is_trained and parameter not in self._written

    def _loan(self, parameter: nn.Parameter) -> Loan:
        if parameter not in self._loans:
            with torch.inference_mode(False), torch.no_grad():  # a copy made in a validation serves training, too
                self._loans[parameter] = loan = self._make_loan(parameter)
                self._known = None
                if self.has_leaves:
                    loan.become_leaf()
            if self._grad_dtype is not None:
                private_module_api.set_grad_dtype(parameter, self._grad_dtype)
        return self._loans[parameter]

    def _make_loan(self, parameter: nn.Parameter) -> Loan:
        return Loan(parameter, parameter.detach().to(self._dtype))

    def _forget(self, loan: Loan) -> None:
        del self._loans[loan.parameter]
        self._places.clear()
        self._known = None
        if loan.parameter.dtype != self._grad_dtype:
            private_module_api.set_grad_dtype(loan.parameter, loan.parameter.dtype)

    # -- weights that forward writes to --------------------------------------------------------------------------------

    def _check_writes(self, root: nn.Module, loans: Sequence[Loan]) -> None:
        """A weight that forward writes to (normalises, clamps) is computed with in fp32 from then on."""
        with private_dispatch_api.without_function_modes():
            versions = private_tensor_api.versions_of([loan.copy for loan in loans])
            written = [loan for loan, version in zip(loans, versions, strict=True) if version != loan.copy_version]
            if root not in self._checked and torch.is_grad_enabled():  # once, for writes that no version shows
                self._checked.add(root)
                written = self._differing(loans)
            if written:
                self._take_written(written)

    def _differing(self, loans: Sequence[Loan]) -> list[Loan]:
        """Those whose copies are no longer their parameters' casts; waits for the device."""
        if not loans:
            return []
        pairs = [(local_shard(loan.now), local_shard(self._rounded(loan))) for loan in loans]
        # Compared as bits: nan is no different from itself then.
        differ = [
            (copy.view(torch.int16) != weight.view(torch.int16)).any()
            if copy.shape == weight.shape and copy.dtype == self._dtype
            else torch.ones((), dtype=torch.bool, device=copy.device)
            for copy, weight in pairs
        ]
        flags = [bool(flag) for flag in differ] if len({f.device for f in differ}) > 1 else torch.stack(differ).tolist()
        return [loan for loan, flag in zip(loans, flags, strict=True) if flag]

    def _rounded(self, loan: Loan) -> Tensor:
        """What a cast makes of the parameter."""
        return loan.parameter.detach().to(self._dtype)

    @torch.no_grad()
    def _take_written(self, written: Sequence[Loan]) -> None:
        own = {loan.parameter for loan in written}
        names = listed([name for name, parameter in self._model.named_parameters() if parameter in own])
        if self.has_leaves:
            raise RuntimeError(
                f"MasterWeightsPrecision: forward writes to {names}, of which DDP has hooked 16-bit copies. Keep its"
                " module in fp32 by a policy, policy={'name.of.module': 'fp32'}, or write to the weight in a hook such"
                " as on_before_zero_grad or on_train_batch_end."
            )
        rank_zero_warn(
            f"MasterWeightsPrecision: forward writes to {names}. It is computed with in fp32 from now on, and cast to"
            " 16 bit at each use."
        )
        for loan in written:
            parameter, now = loan.parameter, loan.now
            # Numbers that forward left alone keep the bits that the copy lacks.
            changed = now != self._rounded(loan)
            parameter.copy_(torch.where(changed, now.to(parameter.dtype), parameter))
            self._written.add(parameter)
            self._forget(loan)

    # -- DDP -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def as_leaves(self) -> Iterator[None]:
        """DDP hooks the copies, which are in the model's place of weights while it is made."""
        self.has_leaves = True
        for loan in self.loans:
            loan.become_leaf()
        with self.opened(trusted=False), self.lending(self._model):
            yield

    @contextmanager
    def gradients_at_leaves(self) -> Iterator[None]:
        """For a backward: the parameters' gradients and hooks are at the leaves, whose gradients DDP reduces.

        Raises:
            RuntimeError: if a gradient has come to a parameter itself, which no rank would average.
        """
        pairs = [(loan.parameter, loan.lent) for loan in self.loans if loan.lent is not None and self.has_leaves]
        private_module_api.move_gradients([parameter for parameter, _ in pairs], [leaf for _, leaf in pairs])
        yield
        direct = {parameter for parameter, _ in pairs if parameter.grad is not None}
        if direct:
            names = listed([name for name, parameter in self._model.named_parameters() if parameter in direct])
            raise RuntimeError(
                f"MasterWeightsPrecision under DDP: {names} was used outside of a module's forward, where its gradient"
                " is not averaged over ranks. Use it in a forward, keep its module in fp32 with"
                " policy={'name.of.module': 'fp32'}, or use FSDP2Strategy or AutocastPrecision."
            )
        private_module_api.move_gradients(
            [leaf for _, leaf in pairs], [parameter for parameter, _ in pairs], hooks=False
        )

    def refuse_gradients_of_leaves(self) -> None:
        """Before a step: a backward past the plugin has left gradients where no optimizer looks for them."""
        if self.has_leaves and [loan for loan in self.loans if loan.lent is not None and loan.lent.grad is not None]:
            raise RuntimeError(
                "MasterWeightsPrecision under DDP: loss.backward() adds gradients to the 16-bit copies that DDP"
                " reduces. Call self.manual_backward(loss), which hands them to the parameters."
            )


class _LendingCall(private_module_api.InterceptedCall):
    """Lends a module its copies when it is called in a step, from outside of other modules."""

    def __init__(self, weights: LentWeights, module: nn.Module) -> None:
        super().__init__(module)
        self._weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = self._weights
        # A compiled function that torch.compile is tracing: what lends may not become a part of its graph.
        if not weights.is_open or torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        if torch.is_autocast_enabled(weights.device_type):
            if weights.is_open == "lent":
                return self.call(*args, **kwargs)
            context = weights.lending(self.module)
        else:  # code has turned it off, to compute in fp32
            context = weights.returned(self.module)
        with context:
            return self.call(*args, **kwargs)


def _called_from_outside(module: nn.Module) -> Iterable[nn.Module]:
    """Modules with weights that steps may call; compiled code calls none of those inside of it."""
    if private_dispatch_api.has_compiled_steps(module):
        return
    # A LightningModule's own weights are used in its steps, too, and these are no calls of a module. Its forward is
    # one where compiled code is called in its place, which calls no module inside of it.
    is_called = not isinstance(module, LightningModule) or private_dispatch_api.is_compiled_module(module)
    if is_called and any(True for _ in module.parameters()):
        yield module
    for child in dict.fromkeys(module.children()):
        yield from _called_from_outside(child)


def _compiled_since(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of compiled modules that are not intercepted, nor called by a module that is."""
    for name, child in module.named_children():
        if not isinstance(vars(child).get("_compiled_call_impl"), _LendingCall):
            if private_dispatch_api.is_compiled_module(child) and any(True for _ in child.parameters()):
                yield prefix + name
                continue
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            continue
        yield from _compiled_since(child, f"{prefix}{name}.")
