"""Gradients of a pipeline's stage: averaged over its ranks, summed over the stages that share a parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.stage_placeholder import StageSplit
from lightning_mp.training.distributed.process_groups import own_group
from lightning_mp.training.gradients.bucketed_all_reduce import reduce_gradients_


class StageGradients:
    """Reduces gradients at the end of a window; until then each rank keeps its own."""

    def __init__(self, module: nn.Module, split: StageSplit, mesh: DeviceMesh, timeout: timedelta) -> None:
        self._module = module
        self._data_group = mesh.get_group("data_parallel")
        self._replicas = mesh.size(1)
        self._tied = self._tied_groups(module, split, mesh, timeout)
        self._is_kept_local = False
        self._holds_local = False

    @property
    def number_of_stages(self) -> dict[Tensor, int]:
        """Of each parameter that several stages hold, how many."""
        return {parameter: stages for group, stages, parameters in self._tied for parameter in parameters}

    @contextmanager
    def kept_local(self) -> Iterator[None]:
        """Inside, backwards reduce nothing."""
        self._is_kept_local = True
        try:
            yield
        finally:
            self._is_kept_local = False

    @contextmanager
    def reduced_after(self) -> Iterator[None]:
        """Around a backward: afterwards its gradients, and those that were kept local before it, are reduced."""
        if self._replicas == 1 and not self._tied:
            yield
            return
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        finished: list[tuple[Tensor, Tensor]] = []
        if not self._holds_local:
            finished = [(p, p.grad) for p in parameters if p.grad is not None]
        if self._is_kept_local and not finished:
            self._holds_local = True
            yield
            return
        # A sum over ranks may not be taken twice, so gradients that have been reduced are set aside.
        for parameter, _ in finished:
            parameter.grad = None
        yield
        self._reduce(parameters)
        self._holds_local = False
        with torch.no_grad():
            for parameter, gradient in finished:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        without = [name for name, p in self._module.named_parameters() if p.requires_grad and p.grad is None]
        if without:
            raise MisconfigurationException(
                f"PipelineParallelStrategy: {listed(without)} got no gradient, and it is not known whether it did on"
                " the ranks that the gradients are reduced with. Freeze what the loss does not depend"
                " on (requires_grad_(False))."
            )
        for group, _, tied in self._tied:
            reduce_gradients_([p.grad for p in tied if p.grad is not None], group, mean=False)
        reduce_gradients_([p.grad for p in parameters if p.grad is not None], self._data_group, mean=True)

    def _tied_groups(
        self, module: nn.Module, split: StageSplit, mesh: DeviceMesh, timeout: timedelta
    ) -> list[tuple[ProcessGroup, int, list[Tensor]]]:
        """For every set of stages that share parameters: this rank's group of them, and the parameters, in order."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        groups = []
        for stages in sorted(set(split.stages_of_parameters.values())):
            # Every rank has to take part in making every group.
            columns = mesh.mesh[list(stages)].T
            own = own_group(columns.tolist(), timeout)
            shared = [name for name in split.parameter_names if split.stages_of_parameters.get(name) == stages]
            if own is not None:
                groups.append((own, len(stages), [self._named(parameters, name, split) for name in shared]))
        return groups

    def _named(self, parameters: dict[str, nn.Parameter], name: str, split: StageSplit) -> Tensor:
        """A shared parameter has one name per module, and a stage knows those of its modules."""
        return parameters[next(n for n in split.names_of[name] if n in parameters)]
