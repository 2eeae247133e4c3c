"""Pipeline parallelism on torch.distributed.pipelining, optionally with data parallelism. Experimental."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.namespace_hint import NamespaceHint
from lightning_mp.ground.core.patches import Patch, Patches
from lightning_mp.ground.modules.stage_placeholder import StageSplit, full_model, stage_split_of
from lightning_mp.pipelining.checkpoints import (
    OptimizerParts,
    gather_on_rank_zero,
    keep_own_parameters,
    own_state,
    with_added_groups,
)
from lightning_mp.pipelining.gradients import StageGradients
from lightning_mp.pipelining.layers import read_layers
from lightning_mp.pipelining.layout import Pipeline
from lightning_mp.pipelining.microbatches import ScheduleName
from lightning_mp.strategies.pipeline_setup import (
    arguments_of_any_strategy,
    check_earlier_split,
    description,
    read_split_points,
    refuse_what_cannot_be_split,
    split_into_stages,
)
from lightning_mp.training.checkpoints.atomic import AtomicCheckpointIO, refuse_shards
from lightning_mp.training.checkpoints.single_file import refuse_other_number
from lightning_mp.training.distributed.buffer_broadcast import BufferBroadcast
from lightning_mp.training.distributed.process_groups import named_mesh
from lightning_mp.training.distributed.rank_settings import RankSettings
from lightning_mp.training.gradients.clipping import clip_by_whole_norm_
from lightning_mp.training.gradients.replication import GradientReplication
from lightning_mp.training.resume.resumable_progress import ResumableProgress

if TYPE_CHECKING:
    from lightning_mp.pipelining.runner import PipelineRunner

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_MICROBATCHES_PER_STAGE = 4


class PipelineParallelStrategy(NamespaceHint, DDPStrategy):
    r"""Splits a model into consecutive stages that process parts of a batch concurrently. Experimental.

    .. code-block:: python

        class Model(pl.LightningModule):
            def pipeline_layers(self):                       # in order
                return [self.embedding, *self.blocks, self.norm, self.head]

            def pipeline_loss(self, logits, batch):          # mean over the samples or tokens of a part of the batch
                return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

            def training_step(self, batch, batch_idx):
                loss = pipelined_loss(self, batch)           # the same without this strategy
                self.log("train_loss", loss)
                return loss

        Trainer(strategy=PipelineParallelStrategy(), devices=4)          # 4 stages
        Trainer(strategy=PipelineParallelStrategy(stages=2), devices=4)  # 2 stages, each on 2 ranks: 2 x 2

    Each stage has only its own layers, with their gradients and optimizer states. A batch is split into microbatches
    along its samples; while one stage works on the second microbatch, the next one works on the first. The gradient is
    that of the whole batch: microbatches are weighted by tokens if the batch has token labels, else by samples.
    A layer takes anything else that it needs, such as a mask, from its microbatch
    (:class:`~lightning_mp.pipelining.PipelineLayer`).

    Stages are idle while the pipeline fills and drains: for :math:`(s - 1) / (m + s - 1)` of each step, with :math:`s`
    stages of equal work and :math:`m` microbatches. The fraction is printed at set-up. "1f1b" lets a stage keep the
    activations of at most ``stages`` microbatches, "gpipe" those of all. A batch whose samples are not a multiple of
    ``microbatches``, such as the last of an epoch, is processed in two runs.

    Ranks are laid out stage by stage: ranks of one stage are neighbours and see different data; their gradients are
    averaged in fp32, once per window of accumulation. Loss scale, skipped steps and the norm for clipping refer to the
    whole model. A parameter on several stages (a head tied to the embedding) gets the sum of its gradients.

    ``configure_optimizers`` sees the whole model, so that parameter groups come out as on one device; afterwards each
    optimizer has the parameters of its stage. Modules of other stages are replaced by a placeholder that says where
    they are, even after the run. Checkpoints are single files, interchangeable with those of a single process.

    Random numbers in layers differ between ranks; those drawn in the step methods are the same on all stages.

    A model built in ``with trainer.init_module(empty_init=True):`` takes no memory before it is split.

    Args:
        stages: number of stages; None uses one per rank. The number of ranks must be a multiple of it.
        microbatches: into how many microbatches a batch is split, at most; None uses 4 per stage.
        schedule: "1f1b" or "gpipe".
        split_points: names of the layers that begin the second and later stages; None balances the parameters.
        process_group_backend: "nccl" or "gloo"; None uses the device's default.
        timeout: timeout of collective operations.
        start_method: how processes are started, as in ``DDPStrategy``.
        kwargs: ``cluster_environment``, ``checkpoint_io`` and other arguments of Lightning's strategies.

    Raises:
        ValueError: if an argument is not valid; at set-up, if ranks or layers cannot be divided that way.
        MisconfigurationException: at set-up, if the module does not define its layers and loss, or the precision plugin
            cannot keep ranks together, or a callback has copied the model (WeightAveraging, SWA).

    References:
        Huang et al., "GPipe", 2019, https://arxiv.org/abs/1811.06965; Narayanan et al., "Efficient Large-Scale Language
        Model Training on GPU Clusters Using Megatron-LM", 2021, https://arxiv.org/abs/2104.04473, section 2.2

    Example:
        >>> from lightning_mp import PipelineParallelStrategy
        >>> PipelineParallelStrategy(stages=2, microbatches=8).schedule
        '1f1b'
    """

    kind = "strategy"

    def __init__(
        self,
        stages: int | None = None,
        microbatches: int | None = None,
        *,
        schedule: ScheduleName = "1f1b",
        split_points: Sequence[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        kwargs = arguments_of_any_strategy(kwargs)
        for name, number in (("stages", stages), ("microbatches", microbatches)):
            if number is not None:
                whole_number(number, name, "PipelineParallelStrategy")
        refuse_unknown(schedule, "schedule", "PipelineParallelStrategy", get_args(ScheduleName))
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method, **kwargs
        )
        self._kwargs = kwargs
        self._collective_timeout = timeout
        self.stages = stages
        self.microbatches = microbatches
        self.schedule: ScheduleName = schedule
        self.split_points = read_split_points(split_points)
        self.pipeline_runner: PipelineRunner | None = None
        self._mesh: DeviceMesh | None = None
        self._split: StageSplit | None = None
        self._parts: dict[Optimizer, OptimizerParts] = {}
        self._gradients: StageGradients | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``Trainer(strategy="mp_pipeline")``: one stage on every rank."""
        if "mp_pipeline" not in strategy_registry:
            strategy_registry.register("mp_pipeline", cls, description="Pipeline parallelism, one stage on every rank")

    # -- ranks and stages ----------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """How many copies of the model there are, each on its own data."""
        ranks = self.num_nodes * self.num_processes
        return ranks // (self.stages or ranks)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All stages of one copy see the same data."""
        return {"num_replicas": self.replicas, "rank": self.global_rank % self.replicas}

    def gradient_replication(self) -> GradientReplication:
        """All ranks step or skip together; the parameters of a stage are on its ranks only."""
        tied = self._gradients.number_of_stages if self._gradients is not None else {}
        return GradientReplication(None, self.replicas, self.replicas, tied)

    def whole_optimizer(self, optimizer: Optimizer) -> list[tuple[str, Tensor | None, int]]:
        """Name, parameter if it is on this rank, and number of ranks, for all parameters of the whole optimizer."""
        assert self._split is not None
        parts = self._parts.get(optimizer) or self._agree_on_groups(optimizer)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        # More than the stages know of, if a group was added in the middle of an epoch.
        of_number = dict(zip(parts.numbers, own, strict=False))
        return [
            (name, of_number.get(number), self.replicas * len(self._split.stages_of_parameters.get(name, (0,))))
            for number, name in enumerate(parts.names)
        ]

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Each stage loads its own part."""
        return True

    @override
    def setup_environment(self) -> None:
        """Starts the process group and lays out the ranks."""
        ranks = self.num_nodes * self.num_processes
        stages = self.stages or ranks
        if ranks % stages:
            raise ValueError(
                f"PipelineParallelStrategy(stages={stages}) needs a multiple of {stages} ranks, and the Trainer has"
                f" {ranks} (devices x num_nodes)."
            )
        super().setup_environment()
        sizes = {"pipeline": stages, "data_parallel": ranks // stages}
        self._mesh = named_mesh(self.root_device.type, sizes, self._collective_timeout)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """For ``trainer.init_module``: on the CPU, or without memory, as no rank may have room for the whole model."""
        where = torch.device("meta") if empty_init else nullcontext()
        with where, self.precision_plugin.tensor_init_context():
            yield

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        """Splits the model, then lets the precision plugin and the optimizers see it."""
        # Brings torch.distributed.pipelining along, so not at the top.
        from lightning_mp.pipelining.runner import PipelineRunner

        assert self.accelerator is not None
        assert self.lightning_module is not None
        assert self._mesh is not None
        self.accelerator.setup(trainer)
        refuse_what_cannot_be_split(trainer, self)
        RankSettings.compare(trainer)
        module = self.lightning_module
        microbatches = self.microbatches or _MICROBATCHES_PER_STAGE * self._mesh.size(0)
        stage, stages = self._mesh.get_local_rank("pipeline"), self._mesh.size(0)
        self._split = split = stage_split_of(module)
        if split is not None:
            check_earlier_split(split, stage, stages, self.split_points)
        else:
            self._split = split = split_into_stages(module, stage, stages, self.split_points, self.root_device)
            rank_zero_info(
                description(split, microbatches=microbatches, replicas=self.replicas, schedule=self.schedule)
            )
        self.model = module
        # After the split, so that only this stage's layers are converted.
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        group = self._mesh.get_group("pipeline")
        pipeline = Pipeline(group, stage, stages, microbatches, self.schedule, self.root_device)
        bounds = (*split.first_layers, None)
        own_layers = read_layers(module)[slice(bounds[stage], bounds[stage + 1])]
        self.pipeline_runner = PipelineRunner(trainer, module, own_layers, pipeline, self._backward_context)
        self._gradients = StageGradients(module, split, self._mesh, self._collective_timeout)
        BufferBroadcast.attach(trainer, [self._mesh.get_group("data_parallel")])
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            ResumableProgress.attach(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Ours clip by the norm of the whole model; Lightning's by that of what a rank holds.
        Patches.of(trainer).replace(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_whole_norm_(optimizer, float(clip_val), self.gradient_replication(), self.root_device)

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Lets ``configure_optimizers`` see the whole model, and leaves each optimizer the parameters of this stage."""
        assert self.lightning_module is not None
        with full_model(self.lightning_module):
            super().setup_optimizers(trainer)
            names = dict(self.lightning_module.named_parameters())
        own = {id(p) for p in self.lightning_module.parameters()}
        self._parts = {optimizer: keep_own_parameters(optimizer, names, own) for optimizer in self.optimizers}

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Stages agree on optimizers and parameter groups that a callback has added at the start of the epoch."""
        if batch_idx == 0:
            self._parts = {optimizer: self._agree_on_groups(optimizer) for optimizer in self.optimizers}

    def _agree_on_groups(self, optimizer: Optimizer) -> OptimizerParts:
        assert self._split is not None
        assert self.lightning_module is not None
        known = self._parts.get(optimizer)
        if known is None:  # it was made inside the fit
            known = OptimizerParts((), (), (), next(iter(self._parts.values())).name_of)
        self._parts[optimizer] = parts = with_added_groups(
            known, optimizer, self.lightning_module.parameters(), self._split.parameter_names
        )
        return parts

    def _backward_context(self) -> AbstractContextManager[Any]:
        # Schedules run backwards inside training_step, whose autocast a backward must not see.
        own: Callable[[], AbstractContextManager[Any]] | None = getattr(self.precision_plugin, "backward_context", None)
        return own() if own is not None else torch.autocast(self.root_device.type, enabled=False)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Inside it gradients are not reduced: for all but the last micro-batch of a window."""
        assert self._gradients is not None
        with self._gradients.kept_local():
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Sets the gradients of the pipeline, and averages them over its copies at the end of a window."""
        assert self._gradients is not None
        assert self.lightning_module is not None
        plugin = self.precision_plugin
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, self.lightning_module)
        with self._gradients.reduced_after():
            plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the state of the whole model, as one process has it; empty on other ranks."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        if self._split is None or self._split.stages == 1:
            return own
        gathered = gather_on_rank_zero(own, self._sender_ranks(), self.root_device)
        return {name: gathered[name] for name in self._split.state_names if name in gathered} if gathered else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the state of the whole optimizer, as one process has it; empty on other ranks."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not self._parts or self._split is None or self._split.stages == 1:
            return inner.state_dict()
        parts = self._agree_on_groups(inner)  # some may have been added in the middle of an epoch
        return parts.whole(inner.state_dict(), self._sender_ranks(), self.root_device)

    def _sender_ranks(self) -> list[int]:
        """One rank of every stage."""
        assert self._mesh is not None
        return [int(rank) for rank in self._mesh.mesh[:, 0].tolist()]

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a single file, written by any strategy on any number of ranks; tensors are read when they are taken."""
        path = Path(self.broadcast(checkpoint_path))
        refuse_shards(path, "PipelineParallelStrategy")
        if type(self.checkpoint_io) not in (TorchCheckpointIO, AtomicCheckpointIO):
            return super().load_checkpoint(path, weights_only=weights_only)  # the plugin that wrote it reads it
        checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the part of this stage; names of the whole model are checked."""
        assert self.lightning_module is not None
        assert self._split is not None
        state = own_state(checkpoint["state_dict"], self.lightning_module, self._split, strict=strict)
        self.lightning_module.load_state_dict(state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes what this stage holds."""
        states = checkpoint["optimizer_states"]
        refuse_other_number(len(states), len(self.optimizers))
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(self._parts[optimizer].own(state))

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Releases the schedules; the model stays split."""
        self.pipeline_runner = None
        module = self.lightning_module
        # After a set-up that failed: Lightning moves the module to the CPU, which would raise another error.
        without_memory = module is not None and any(p.is_meta for p in module.parameters())
        with Patch(module, "cpu", lambda: module) if without_memory else nullcontext():
            super().teardown()


PipelineParallelStrategy.register_strategies(StrategyRegistry)
