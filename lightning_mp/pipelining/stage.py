"""One stage of a pipeline, as torch.distributed.pipelining takes it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

from lightning_mp.ground.modules.state import keep_module
from lightning_mp.pipelining.layers import Layer, pipeline_input, run_layers


class StageModule(nn.Module):
    """The layers of a stage, one after the other, on the microbatch with the number that it is given.

    Batches may be anything, and torch splits tensors only: so what travels through its schedule is numbers of
    microbatches, and each stage looks its microbatch up in the batch, which it has.
    """

    def __init__(self, owner: nn.Module, layers: Sequence[Layer], *, is_first: bool) -> None:
        super().__init__()
        # Past nn.Module's own __setattr__: the owner keeps its parameters.
        self.__dict__["_owner"] = owner
        self._layers = list(layers)
        self._is_first = is_first
        self._microbatches: Sequence[Any] = ()
        self._undo_probe: Callable[[], None] | None = None
        self._probed = False

    def begin(self, microbatches: Sequence[Any]) -> None:
        """The microbatches of the run that comes."""
        self._microbatches = microbatches

    def end(self) -> None:
        """Lets the microbatches go."""
        self._microbatches = ()
        self._undo_probe = None

    @override
    def forward(self, *hidden: Any, microbatch: Tensor) -> Any:
        """From what the stage before has sent, or the input, to what is sent on, or the output."""
        number = int(microbatch)
        self._clean_up_after_probe(number)
        batch = self._microbatches[number]
        owner = self.__dict__["_owner"]
        value = pipeline_input(owner, batch) if self._is_first else hidden[0] if len(hidden) == 1 else hidden
        output = run_layers(self._layers, value, batch)
        # What is sent has to be contiguous; the backends say only that it is not.
        return tuple(map(_contiguous, output)) if isinstance(output, tuple) else _contiguous(output)

    def _clean_up_after_probe(self, number: int) -> None:
        """Before its first run torch may send the first microbatch through once to see shapes: buffers forget that."""
        if self._probed:
            return
        if self._undo_probe is None:
            self._undo_probe = keep_module(self.__dict__["_owner"])
            return
        if number == 0:
            self._undo_probe()
        self._undo_probe, self._probed = None, True


class Stage(PipelineStage):
    """torch's stage, with its backwards outside of autocast, as Lightning's are."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        stages: int,
        device: torch.device,
        *,
        group: ProcessGroup,
        backward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(module, index, stages, device, group=group)
        self._backward_context = backward_context

    @override
    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Backward of one microbatch, in the context for backwards."""
        with self._backward_context():
            super().backward_one_chunk(*args, **kwargs)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value
