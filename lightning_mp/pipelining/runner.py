"""A batch's way through the stages: forwards, backwards, and one loss that every stage knows."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.patches import Patch
from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.ground.modules.state import gradients_set_aside
from lightning_mp.pipelining.layers import Layer, loss_of
from lightning_mp.pipelining.layout import Pipeline
from lightning_mp.pipelining.microbatches import microbatches_of, refuse_other_batches, signature
from lightning_mp.pipelining.ready_gradients import factor_of_backward, loss_with_gradients
from lightning_mp.pipelining.shares import microbatch_shares, weighting_of
from lightning_mp.pipelining.stage import Stage, StageModule
from lightning_mp.training.accumulation.batch_split import Microbatch
from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.loss_weighting import Weighting

#: Each keeps receive buffers for one shape of microbatches.
_KEPT_SCHEDULES = 8


class LastStageBroadcast:
    """Broadcasts values of the last stage; call it on all stages."""

    def __init__(self, pipeline: Pipeline, owner: str) -> None:
        self._pipeline = pipeline
        self._owner = owner
        self._names: dict[bool, list[str]] = {}

    def scalars(self, values: dict[str, Tensor], *, training: bool) -> dict[str, Tensor]:
        """One small broadcast; the names are sent with the first batch."""
        pipeline = self._pipeline
        if pipeline.stages == 1:
            return values
        if training not in self._names:
            sent = [list(values)]
            dist.broadcast_object_list(sent, src=pipeline.last_rank, group=pipeline.group)
            self._names[training] = sent[0]
        names = self._names[training]
        if pipeline.is_last and list(values) != names:
            raise MisconfigurationException(
                f"{self._owner}.pipeline_loss returned {list(values)}, and {names} the first time. All"
                " stages wait for the same values: return the same names for every batch of a loop."
            )
        vector = torch.zeros(len(names), dtype=torch.float32, device=pipeline.device)
        if pipeline.is_last:
            vector = torch.stack([values[name] for name in names])
        dist.broadcast(vector, src=pipeline.last_rank, group=pipeline.group)
        return dict(zip(names, vector.unbind(), strict=True))

    def outputs(self, parts: Sequence[Any]) -> Any:
        """Outputs of the runs of a batch, joined along the samples: a tensor, or a tuple of tensors."""
        pipeline = self._pipeline
        tuples = [part if isinstance(part, tuple) else (part,) for part in parts]
        joined = [torch.cat(part) for part in zip(*tuples, strict=True)] if pipeline.is_last else []
        if pipeline.stages > 1:
            sent = [[(tensor.shape, tensor.dtype) for tensor in joined]]
            dist.broadcast_object_list(sent, src=pipeline.last_rank, group=pipeline.group)
            if not pipeline.is_last:
                joined = [torch.empty(shape, dtype=dtype, device=pipeline.device) for shape, dtype in sent[0]]
            for tensor in joined:
                dist.broadcast(tensor.contiguous(), src=pipeline.last_rank, group=pipeline.group)
        return joined[0] if len(joined) == 1 else tuple(joined)


@dataclass
class _Schedule:
    """torch's schedule for microbatches of one shape, and its parts."""

    schedule: ScheduleGPipe | Schedule1F1B
    stage: Stage
    module: StageModule


class PipelineRunner:
    r"""Runs batches through the pipeline that this rank is a stage of.

    .. math:: L = \sum_j \frac{n_j}{n} L_j, \qquad G = \sum_j \nabla \Big( \frac{n_j}{n} L_j \Big)

    where :math:`L_j` is the mean loss of microbatch :math:`j` over its :math:`n_j` samples or tokens. Forwards and
    backwards of all microbatches are over when :meth:`loss` returns; its result assigns the gradients when Lightning
    calls backward. They are scaled as Lightning's own backward will scale them, so that nothing
    underflows that would not on one device.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        module: "pl.LightningModule",
        layers: Sequence[Layer],
        pipeline: Pipeline,
        backward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._layers = list(layers)
        self._pipeline = pipeline
        self._backward_context = backward_context
        self._schedules: OrderedDict[Any, _Schedule] = OrderedDict()
        self._last_stage = LastStageBroadcast(pipeline, type(module).__name__)
        self._weighting: dict[Any, Weighting] = {}
        self._compared: Any = None
        self._trainable: list[str] = []
        self._microbatches: list[Microbatch] = []
        self._shares: list[float] = []
        self._factor: Tensor | None = None
        self._values: dict[int, dict[str, Tensor]] = {}
        self._rng = RankRNG(dist.get_rank(), seed=torch.initial_seed)
        # A layer on a GPU may also draw on the CPU, as to leave itself out.
        self._rng_devices = dict.fromkeys((torch.device("cpu"), pipeline.device))

    # -- what users call -----------------------------------------------------------------------------------------------

    def loss(self, batch: Any) -> dict[str, Tensor]:
        """Mean loss of a batch, and what else ``pipeline_loss`` returns, on every stage.

        Under ``torch.no_grad`` there are forwards only.
        """
        training = torch.is_grad_enabled()
        self._compare(batch)
        runs = microbatches_of(batch, self._pipeline.microbatches)
        shares = self._shares_of(batch, [microbatch for run in runs for microbatch in run])
        with self._nothing_logged():
            return self._train(runs, shares) if training else self._evaluate(runs, shares)

    def output(self, batch: Any) -> Any:
        """What the last layer returns for a batch, on every stage. Forwards only."""
        self._compare(batch)
        outputs = []
        with _plain_no_grad(), self._nothing_logged():
            for run in microbatches_of(batch, self._pipeline.microbatches):
                made = self._schedule(run, kind="output")
                outputs.append(self._step(made, run, made.schedule.eval, return_outputs=True))
            return self._last_stage.outputs(outputs)

    # -- forwards and backwards ----------------------------------------------------------------------------------------

    def _train(self, runs: list[list[Microbatch]], shares: list[float]) -> dict[str, Tensor]:
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._factor = factor_of_backward(
            self._trainer, torch.zeros((), dtype=torch.float32, device=self._pipeline.device)
        )
        with gradients_set_aside(parameters):
            values = self._run(runs, shares, kind="train")
            with_gradient = [p for p in parameters if p.grad is not None]
            computed = [p.grad for p in with_gradient if p.grad is not None]
        return {**values, "loss": loss_with_gradients(values["loss"], with_gradient, computed, self._factor)}

    def _evaluate(self, runs: list[list[Microbatch]], shares: list[float]) -> dict[str, Tensor]:
        with _plain_no_grad():
            return self._run(runs, shares, kind="evaluate")

    def _run(self, runs: list[list[Microbatch]], shares: list[float], kind: str) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for run in runs:
            made = self._schedule(run, kind)
            self._shares, shares = shares[: len(run)], shares[len(run) :]
            step = made.schedule.step if kind == "train" else made.schedule.eval
            self._step(made, run, step, return_outputs=False)
            for number, values in sorted(self._values.items()):
                for name, value in values.items():
                    weighted = value if name == "loss" else value * self._shares[number]
                    total[name] = total[name] + weighted if name in total else weighted
            self._values.clear()
        return self._last_stage.scalars(total, training=kind == "train")

    def _step(self, made: _Schedule, run: list[Microbatch], step: Callable[..., Any], *, return_outputs: bool) -> Any:
        numbers = torch.arange(len(run))
        first = (numbers,) if self._pipeline.stage == 0 else ()
        target = numbers if self._pipeline.is_last and not return_outputs else None
        made.module.begin([microbatch.batch for microbatch in run])
        self._microbatches = run
        try:
            with self._rng.drawn(*self._rng_devices) if self._pipeline.stages > 1 else nullcontext():
                return step(*first, target=target, return_outputs=return_outputs, microbatch=numbers)
        finally:
            # Evaluation leaves what backwards would need.
            made.stage.clear_runtime_states()
            made.module.end()
            self._microbatches = []

    def _loss_of_microbatch(self, output: Any, target: Tensor) -> Tensor:
        """What torch's schedule runs backward from; called on the last stage."""
        number = int(target)
        share = self._shares[number]
        microbatch = self._microbatches[number].batch
        if share == 0:
            # Its mean is over nothing, 0 / 0.
            nothing = sum(tensor.float().nan_to_num(0, 0, 0).sum() * 0 for tensor in tensors_in(output))
            assert isinstance(nothing, Tensor)
            return nothing
        values = loss_of(self._module, output, microbatch)
        # A loss that is a sum over a number that the batch names needs no weight: it adds up.
        weight = 1.0 if batch_tokens.declared_divisor(microbatch) is not None else share
        with torch.autocast(self._pipeline.device.type, enabled=False):
            loss = values["loss"].float() * weight if weight != 1 else values["loss"].float()
            self._values[number] = {name: value.detach().float() for name, value in values.items()}
            self._values[number]["loss"] = loss.detach()
            return loss * self._factor if self._factor is not None and torch.is_grad_enabled() else loss

    def _schedule(self, run: list[Microbatch], kind: str) -> _Schedule:
        device_type = self._pipeline.device.type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        key = (kind, len(run), signature(run[0].batch), autocast)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        pipeline = self._pipeline
        module = StageModule(self._module, self._layers, is_first=pipeline.stage == 0)
        stage = Stage(
            module,
            pipeline.stage,
            pipeline.stages,
            pipeline.device,
            group=pipeline.group,
            backward_context=self._backward_context,
        )
        # 1F1B needs a microbatch for every stage; with fewer both do the same.
        kind_of_schedule = (
            Schedule1F1B if pipeline.schedule == "1f1b" and len(run) >= pipeline.stages else ScheduleGPipe
        )
        loss = None if kind == "output" else self._loss_of_microbatch
        made = _Schedule(kind_of_schedule(stage, len(run), loss_fn=loss, scale_grads=False), stage, module)
        self._schedules[key] = made
        if len(self._schedules) > _KEPT_SCHEDULES:
            self._schedules.popitem(last=False)
        return made

    # -- comparing stages ----------------------------------------------------------------------------------------------

    def _compare(self, batch: Any) -> None:
        """With the first batch of a loop or an epoch; also whether weights were frozen or unfrozen."""
        now = (self._trainer.state.stage, self._trainer.current_epoch)
        if self._pipeline.stages == 1 or now == self._compared:
            return
        self._compared = now
        trainable = [name for name, p in self._module.named_parameters() if p.requires_grad]
        changed, self._trainable = trainable != self._trainable, trainable
        if any(refuse_other_batches(batch, self._pipeline.group, changed)):
            # What is sent back from stage to stage depends on it.
            self._schedules.clear()

    # -- weights -------------------------------------------------------------------------------------------------------

    def _shares_of(self, batch: Any, microbatches: list[Microbatch]) -> list[float]:
        if len(microbatches) == 1:
            return [1.0]
        return microbatch_shares(microbatches, self._weighting_for(batch))

    def _weighting_for(self, batch: Any) -> Weighting:
        loop = self._trainer.state.stage  # each may have another kind of batch
        if loop not in self._weighting:
            self._weighting[loop] = weighting_of(
                self._trainer, batch, lambda: batch_tokens.shifts_labels_inside(self._module, batch)
            )
        return self._weighting[loop]

    @contextmanager
    def _nothing_logged(self) -> Iterator[None]:
        """``self.log`` on one stage alone would let the others wait."""

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise MisconfigurationException(
                "self.log was called inside of a layer or of pipeline_loss, which runs for every microbatch and on one"
                " stage only. Return the value from pipeline_loss, in a mapping beside 'loss', and log what"
                " pipelined_loss returns, in training_step or validation_step."
            )

        with ExitStack() as stack:
            for owner in self._module.modules():
                if isinstance(owner, pl.LightningModule):
                    for name in ("log", "log_dict"):
                        stack.enter_context(Patch(owner, name, refuse))
            yield


@contextmanager
def _plain_no_grad() -> Iterator[None]:
    """Lightning evaluates in inference mode, whose tensors torch's receive buffers could not be."""
    with torch.inference_mode(False), torch.no_grad():
        yield
