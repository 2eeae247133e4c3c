"""Several optimizers as one: Muon for the matrices and AdamW for the rest, under automatic optimization."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, Muon, Optimizer
from typing_extensions import override

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.ground.core.messages import listed
from lightning_mp.training.optimizers.matrix_blocks import BLOCKS, refuse_unknown_blocks
from lightning_mp.training.optimizers.parts import OptimizerOfParts
from lightning_mp.training.optimizers.sharded_muon import needs_own_step, sharded_step

# In every parameter group, and so in every checkpoint: the index of the optimizer that steps the group.
_OWNER = "optimizer_index"


class JointOptimizer(OptimizerOfParts):
    """Steps several optimizers as one, each on its own parameter groups.

    Lightning's automatic optimization, learning-rate schedulers, gradient clipping, loss scaling and master weights
    work with a single optimizer. This one exposes the parameter groups of all its optimizers (the same dictionaries, so
    that what a scheduler sets takes effect) and one shared ``state``. Each optimizer runs its own step, and its own
    ``state_dict`` and ``load_state_dict`` save and load its part, so nothing is lost on resume::

        def configure_optimizers(self):
            matrices, rest = matrices_and_rest(self)
            return JointOptimizer([Muon(matrices, lr=0.02), AdamW(rest, lr=3e-4)], module=self)

    A step is, in order:

    .. code-block:: text

        loss <- closure()                      once, with gradients enabled, if there is a closure
        for optimizer in optimizers:           in the order in which they were given
            optimizer.step()                   on its own groups and state

    A ``torch.optim.Muon`` over DTensors (FSDP2, tensor parallelism) is stepped so that each matrix is gathered on one
    rank and orthogonalised once, and by blocks where ``matrices_and_rest(split=...)`` says so; see
    :func:`~lightning_mp.training.optimizers.sharded_muon.sharded_step`.

    If every optimizer unscales and skips in its own kernel (``fused=True``), so does the joint one; otherwise
    gradients are unscaled and checked before the step.

    Args:
        optimizers: one or more optimizers with disjoint parameters. Step them only through this one from now on.
        module: the module being trained. If given, a trainable parameter that no optimizer has is refused, and messages
            name parameters. Precision plugins of this package check this even without it.

    Raises:
        ValueError: if there is no optimizer, one of them is not a ``torch.optim.Optimizer``, a parameter belongs to two
            of them, or a trainable parameter of ``module`` to none.
        MisconfigurationException: if an optimizer must evaluate the loss itself (LBFGS, SAM), or has matrices to
            orthogonalise by blocks and is not torch's Muon.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> muon = torch.optim.Muon([net[0].weight], lr=0.02)
        >>> adamw = torch.optim.AdamW([net[0].bias, *net[1].parameters()], lr=1e-3)
        >>> optimizer = JointOptimizer([muon, adamw], module=net)
        >>> net(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> [group["lr"] for group in optimizer.param_groups], len(optimizer.state)
        ([0.02, 0.001], 4)
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, module: nn.Module | None = None) -> None:
        self.optimizers = _checked_optimizers(optimizers)
        _refuse_shared_parameters(self.optimizers, module)
        refuse_unknown_blocks(self.optimizers, knows=Muon)
        for index, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                group[_OWNER] = index
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
        if module is not None:
            self.refuse_unassigned_parameters(module)
        self._share()

    # torch's protocol: GradScaler and fused kernels look for an attribute of this name.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        return all(private_optimizer_api.supports_amp_scaling(optimizer) for optimizer in self.optimizers)

    def refuse_unassigned_parameters(self, module: nn.Module) -> None:
        """Refuses a module with trainable parameters that no optimizer has.

        Raises:
            ValueError: if there are any; names them.
        """
        taken = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in taken]
        if left:
            raise ValueError(
                f"JointOptimizer: {listed(left)} would not be trained: the parameters require gradients, and none of"
                f" {self._names()} takes them. Give them to one of the optimizers (matrices_and_rest(module) leaves"
                " none out), or freeze them with requires_grad_(False)."
            )

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with every optimizer.

        Args:
            closure: evaluates the loss; called once, before the first optimizer's step.

        Returns:
            What the closure returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        # What fused kernels unscale by, and skip on; GradScaler sets both for the time of a step.
        in_kernel: dict[str, Any] = {
            name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)
        }
        for optimizer in self.optimizers:
            vars(optimizer).update(in_kernel)
            try:
                if needs_own_step(optimizer):
                    sharded_step(optimizer)
                else:
                    optimizer.step()
            finally:
                for name in in_kernel:
                    delattr(optimizer, name)
        return loss

    def train(self) -> None:
        """Calls ``train()`` of the optimizers that have one, as schedule-free ones do."""
        self._share()
        for optimizer in self.optimizers:
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()  # type: ignore[attr-defined]  # has one

    def eval(self) -> None:
        """Calls ``eval()`` of the optimizers that have one."""
        self._share()
        for optimizer in self.optimizers:
            if callable(getattr(optimizer, "eval", None)):
                optimizer.eval()  # type: ignore[attr-defined]  # has one

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer whose index is ``param_group["optimizer_index"]``; by default the last one.

        Raises:
            ValueError: if there is no optimizer with this index.
        """
        if hasattr(self, "state"):  # else the constructor adds groups that their optimizers have
            owner = param_group.setdefault(_OWNER, len(self.optimizers) - 1)
            if owner not in range(len(self.optimizers)):
                raise ValueError(
                    f"JointOptimizer.add_param_group: {_OWNER}={owner!r}, and there are {len(self.optimizers)}"
                    f" optimizers ({self._names()}). Give an index from 0 to {len(self.optimizers) - 1}, or leave it"
                    " out for the last one."
                )
            self._share()
            self.optimizers[owner].add_param_group(param_group)
        super().add_param_group(param_group)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """All groups and states, in torch's usual format; each optimizer's own ``state_dict`` provides its part."""

        def join_parts(_: Optimizer, __: dict[str, Any]) -> dict[str, Any]:
            parts = []
            for optimizer in self.optimizers:
                with self._own_state(optimizer):
                    parts.append(optimizer.state_dict())
            return self._joined(parts)

        # Before the hooks that others have registered, which see the joined state.
        handle = self.register_state_dict_post_hook(join_parts, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a :meth:`state_dict` of this class, or of one optimizer with the same groups and group sizes.

        Raises:
            ValueError: if the groups differ in number or size, or belong to another optimizer.
        """
        owners = [group[_OWNER] for group in self.param_groups]
        final: dict[str, Any] = {}

        def take(_: Optimizer, hooked: dict[str, Any]) -> dict[str, Any]:
            final.update(hooked)
            return {**hooked, "state": {}}

        # torch checks the groups, and runs the hooks of others around; each optimizer loads its own state.
        handles = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(lambda _: self._load_parts(final, owners), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _load_parts(self, state_dict: dict[str, Any], owners: Sequence[int]) -> None:
        # Numbers, or names in a state that was read from shards.
        owned = {name for group in state_dict["param_groups"] for name in group["params"]}
        for index, optimizer in enumerate(self.optimizers):
            groups = [
                {**group, _OWNER: index}
                for group, owner in zip(state_dict["param_groups"], owners, strict=True)
                if owner == index
            ]
            for group, now in zip(groups, optimizer.param_groups, strict=True):
                # How the model divides, and its ranks: not what a checkpoint says.
                group.pop(BLOCKS, None)
                group.update({BLOCKS: now[BLOCKS]} if BLOCKS in now else {})
            others = owned.difference(*(group["params"] for group in groups))
            state = {name: value for name, value in state_dict["state"].items() if name not in others}
            optimizer.state = defaultdict(dict)
            before = [optimizer.defaults.keys() & group for group in optimizer.param_groups]
            optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})
            _refuse_another_optimizer(optimizer, before)
            self.state.update(optimizer.state)
        # Their groups are new dictionaries now.
        loaded = [iter(optimizer.param_groups) for optimizer in self.optimizers]
        self.param_groups = [next(loaded[owner]) for owner in owners]
        self._share()

    def joined_state_dict(self, state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Joins the states of single optimizers, one per optimizer of this one, into one that it can load.

        Args:
            state_dicts: of optimizers with the groups of :attr:`optimizers`, in the same order.

        Raises:
            ValueError: if their number, or the number of groups in one of them, differs.
        """
        here, there = (
            [sum(group[_OWNER] == index for group in self.param_groups) for index in range(len(self.optimizers))],
            [len(state_dict["param_groups"]) for state_dict in state_dicts],
        )
        if here != there:
            raise ValueError(
                f"JointOptimizer.joined_state_dict: the states have {there} parameter groups, {self._names()} have"
                f" {here}. Give one state for each optimizer, in their order."
            )
        return self._joined(state_dicts)

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state dict with the groups in this optimizer's order, and parameters numbered through."""
        groups: list[dict[str, Any]] = []
        state: dict[Any, Any] = {}
        of_part = [iter(part["param_groups"]) for part in parts]
        numbers: list[dict[int, int]] = [{} for _ in parts]
        count = 0
        for group in self.param_groups:
            owner = group[_OWNER]
            saved = next(of_part[owner])
            for index in saved["params"]:
                numbers[owner][index] = count
                count += 1
            groups.append({**saved, _OWNER: owner, "params": [numbers[owner][index] for index in saved["params"]]})
        for part, number in zip(parts, numbers, strict=True):
            state.update({number.get(key, key): value for key, value in part["state"].items()})
        extra = {key: value for part in parts for key, value in part.items() if key not in ("state", "param_groups")}
        return {**extra, "state": state, "param_groups": groups}

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    # -- sharing -------------------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Gives each optimizer its groups as they are now, split or narrowed for a step perhaps, and the one state."""
        for index, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = [group for group in self.param_groups if group[_OWNER] == index]
            optimizer.state = self.state

    @contextmanager
    def _own_state(self, optimizer: Optimizer) -> Iterator[None]:
        """While this is entered, the optimizer's state holds nothing of the others' parameters."""
        self._share()
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kept = {key: value for key, value in self.state.items() if not isinstance(key, Tensor) or id(key) in own}
        optimizer.state = defaultdict(dict, kept)
        try:
            yield
        finally:
            optimizer.state = self.state

    def _names(self) -> str:
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)


def join_saved_states(checkpoint: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Joins the states of a checkpoint that was written with the parts of a joint optimizer as optimizers of a run."""
    states = checkpoint["optimizer_states"]
    if len(optimizers) == 1 and isinstance(optimizers[0], JointOptimizer) and len(states) > 1:
        checkpoint["optimizer_states"] = [optimizers[0].joined_state_dict(states)]


def _checked_optimizers(given: Any) -> list[Optimizer]:
    optimizers = list(given) if isinstance(given, Iterable) else []
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        got = ", ".join(type(each).__name__ for each in optimizers) if isinstance(given, Iterable) else "one alone"
        raise ValueError(
            f"JointOptimizer: it takes a list of torch.optim optimizers, got {got or 'none'}. For instance"
            " JointOptimizer([Muon(matrices), AdamW(rest)])."
        )
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
            raise MisconfigurationException(
                f"JointOptimizer: {type(optimizer).__name__} evaluates the loss itself, several times in one step, at"
                " which the other optimizers would have stepped or not. Use it alone, or an optimizer whose step needs"
                " no closure."
            )
    return optimizers


def _refuse_another_optimizer(optimizer: Optimizer, settings: Sequence[AbstractSet[str]]) -> None:
    """After a load, the optimizer's own code has added what an older version of it did not save."""
    missing = {
        name for names, group in zip(settings, optimizer.param_groups, strict=True) for name in names - group.keys()
    }
    if missing:
        name = type(optimizer).__name__
        raise ValueError(
            f"JointOptimizer: the checkpoint's groups for {name} lack {listed(sorted(missing))}: another optimizer"
            " saved them. Resume with the optimizers that saved it, in their order, or load its weights only."
        )


def _refuse_shared_parameters(optimizers: Sequence[Optimizer], module: nn.Module | None) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()} if module is not None else {}
    owners: dict[int, int] = {}
    shared = []
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                first = owners.setdefault(id(parameter), index)
                if first != index:
                    given = group.get("param_names", [])[position : position + 1]
                    name = names.get(id(parameter)) or (given[0] if given else f"a parameter {tuple(parameter.shape)}")
                    shared.append(f"{name} (in optimizers {first} and {index})")
    if shared:
        raise ValueError(
            f"JointOptimizer: {listed(shared)}: it would be stepped twice. Give each parameter to one optimizer; tied"
            " weights count once."
        )
