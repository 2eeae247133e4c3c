"""FSDP2 and tensor parallelism, alone or combined, for unmodified models."""

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.core.arguments import true_or_false, whole_number
from lightning_mp.ground.core.namespace_hint import NamespaceHint
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.precisions import low_dtype
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.strategies.fsdp2_model import gather_in_steps, shard_model
from lightning_mp.strategies.refused import (
    refuse_copies_of_the_model,
    refuse_own_parallelism,
    refuse_scaler_of_torch,
    refuse_sync_batchnorm,
)
from lightning_mp.training.checkpoints.atomic import (
    begin_checkpoint,
    commit_checkpoint,
    existing_checkpoint,
    is_local,
    recover_checkpoint,
    remove_checkpoint,
    temporary_path,
)
from lightning_mp.training.checkpoints.background import BackgroundShards
from lightning_mp.training.checkpoints.fused_qkv import convert_optimizer_states
from lightning_mp.training.checkpoints.sharded import load_checkpoint, without_synthetic_step
from lightning_mp.training.checkpoints.single_file import full_optimizer_state
from lightning_mp.training.distributed.async_sum import AsyncAnyRank
from lightning_mp.training.distributed.buffer_broadcast import BufferBroadcast
from lightning_mp.training.distributed.process_groups import gloo_group, named_mesh
from lightning_mp.training.distributed.rank_settings import RankSettings
from lightning_mp.training.gradients.clipping import let_clip_over_meshes
from lightning_mp.training.gradients.fused_optimizers import refuse_without_dtensors
from lightning_mp.training.gradients.ranks_alike import RankConsistencyCheck
from lightning_mp.training.optimizers.low_bit_states import refuse_whole_checkpoints
from lightning_mp.training.policy.unit_selection import Shard, read_resharding, read_shard, unit_names
from lightning_mp.training.resume.resumable_progress import ResumableProgress
from lightning_mp.training.tensor_parallel.apply import TensorParallelSplit
from lightning_mp.training.tensor_parallel.known_models import Style
from lightning_mp.training.tensor_parallel.plan import Plan, check_divisible, read_plan, resolve_plan
from lightning_mp.training.tensor_parallel.sequence_parallel import check_sequence_styles

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class FSDP2Strategy(NamespaceHint, ModelParallelStrategy):
    """Shards any LightningModule with FSDP2, splits its layers by tensor parallelism, or both.

    .. code-block:: python

        Trainer(strategy=FSDP2Strategy(shard={Block}), devices=8)            # by class
        Trainer(strategy=FSDP2Strategy(shard="my_project.Block"), ...)       # by name, as in YAML
        Trainer(strategy=FSDP2Strategy(shard="model.blocks.*"), ...)         # by a glob over names of modules
        Trainer(strategy=FSDP2Strategy(shard=10_000_000), ...)               # every module of that many parameters
        Trainer(strategy="mp_fsdp2", ...)                                    # finds the blocks
        Trainer(strategy=FSDP2Strategy(replicate_size=2), devices=8)         # 2 copies, each over 4 ranks
        Trainer(strategy=FSDP2Strategy(tensor_parallel_size=2), devices=8)   # 4 data ranks, each over 2

    The model needs no change: no ``configure_model``, no wrapper, and the same names in the state dict. Each module
    that matches becomes a unit: its weights are gathered before its forward and freed after it. All other weights are
    gathered for the whole step. All parameters become DTensors.

    Precision comes from the plugin, see :func:`~lightning_mp.training.policy.gathered_dtypes.gathered_dtypes`: with
    ``*-mixed`` weights that autocast would cast anyway are gathered in 16 bit, all others in fp32, so that every
    operation has the same dtypes as on one device. Gradients are reduced in fp32, and buffers are not cast. All ranks
    start from the weights of rank 0, and keep its running statistics, as under DDP.

    Gradients are reduced once per window of accumulation or at every micro-batch, as
    set by ``AccumulationScheduler(sync=...)``; without it, at every micro-batch. ``ActivationCheckpointing`` is applied
    inside the units. In manual optimization each part of the LightningModule is gathered when it is called, not for the
    whole step, because optimizers are stepped in the middle. Lightning refuses ``torch.compile(LightningModule)`` here;
    compile in place: ``block.compile()``, ``self.model.compile()``.

    A model built in ``with trainer.init_module(empty_init=True):`` takes no memory before it is sharded; units are
    initialised in turn, by their modules' ``reset_parameters``, with the same weights on any number of ranks.

    The model stays sharded after the run; to call it directly, use the autocast of the run.

    Checkpoints are folders with the shards of every rank, or with ``save_distributed_checkpoint=False`` a single file
    that any strategy reads. Both resume on any number of ranks, and get their final name only when they are complete.
    Fused query-key-value matrices are stored in a different order on the ranks; state dicts have the order of one
    process, so all ranks must call ``state_dict`` together.

    Args:
        shard: a module class, its name, a glob over names, or several of these; or a number of parameters, for the
            smallest modules that have that many; or "auto": repeated children of an ``nn.ModuleList``, such as a
            transformer's blocks. Of nested modules the outer one is taken.
        replicate_size: hybrid sharding: how many copies of the model there are, each sharded over the other ranks.
        tensor_parallel_size: over how many ranks each layer of the plan is split; they are neighbours, so use no more
            than a node has.
        tensor_parallel_plan: globs over names of layers to styles
            (:func:`~lightning_mp.training.tensor_parallel.layers.split_layer`), of which the first match applies;
            "auto" or None for Hugging Face's Llama and GPT-2 and the GPT of ``lightning-mp demo``: attention runs on
            each rank's heads only, and the loss is computed on logits that stay split by vocabulary
            (``F.cross_entropy`` and ``nn.CrossEntropyLoss``, also inside transformers; in training any other use of the
            logits gathers them, on all ranks together; in evaluation they are whole). "auto_sequence" also splits the
            sequence, in and between blocks (:mod:`~lightning_mp.training.tensor_parallel.sequence_parallel`). Both can
            be values of a mapping: ``{"*.lm_head": "column_gather", "*": "auto"}`` is "auto" with a different head, and
            "whole" leaves a layer as it is.
        reshard_after_forward: free the weights of units between forward and backward (True), keep them (False), or
            spread them over that many ranks; None for the default of FSDP2.
        save_distributed_checkpoint: one file per rank (True), or a single file (False).
        async_checkpoints: write shards in the background: a save copies them to host memory and training continues. A
            folder gets its name when all ranks have written, and only then are older ones removed. One is written at a
            time, and ``fit`` returns, or raises, after the last one is complete; its failure ends training at one of
            the next two batches. After ``fit``, ``trainer.save_checkpoint`` writes synchronously.
        process_group_backend: "nccl" or "gloo"; None uses the device's default.
        timeout: timeout of collective operations.

    Raises:
        ValueError: if an argument cannot be read, or single files are to be written in the background; at set-up, if a
            rule matches nothing, or sizes do not divide.
        RuntimeError: if a checkpoint could not be written in the background.
        MisconfigurationException: at set-up, if a module on the meta device has no ``reset_parameters``, the precision
            plugin cannot keep ranks together, a callback has copied the model (WeightAveraging, SWA),
            ``sync_batchnorm`` is set, or an earlier run has sharded the model over other sizes; at a step, if ranks
            have run different units; at a checkpoint, if its path is not on a mounted file system.

    References:
        Zhao et al., "PyTorch FSDP", 2023, https://arxiv.org/abs/2304.11277; Shoeybi et al., "Megatron-LM", 2019,
        https://arxiv.org/abs/1909.08053

    Example:
        >>> from lightning_mp.strategies.fsdp2 import FSDP2Strategy
        >>> FSDP2Strategy(shard="model.blocks.*").unit_names
        ()
    """

    kind = "strategy"

    def __init__(
        self,
        shard: Shard = "auto",
        *,
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: Plan | None = None,
        reshard_after_forward: bool | int | None = None,
        save_distributed_checkpoint: bool = True,
        async_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
    ) -> None:
        for name, size in (("replicate_size", replicate_size), ("tensor_parallel_size", tensor_parallel_size)):
            whole_number(size, name, "FSDP2Strategy", unit="ranks")
        true_or_false(save_distributed_checkpoint, "save_distributed_checkpoint", "FSDP2Strategy")
        true_or_false(async_checkpoints, "async_checkpoints", "FSDP2Strategy")
        if async_checkpoints and not save_distributed_checkpoint:
            raise ValueError(
                "FSDP2Strategy(async_checkpoints=True) writes folders with shards in the background, and"
                " save_distributed_checkpoint=False requires single files, which rank 0 gathers and writes. Leave one"
                " of them out; `lightning-mp consolidate` makes a single file of a folder."
            )
        if tensor_parallel_plan is not None and tensor_parallel_size == 1:
            raise ValueError(
                "FSDP2Strategy(tensor_parallel_plan=...) says how layers are split, and tensor_parallel_size=1 splits"
                " none. Give a tensor_parallel_size of 2 or more, or leave the plan out."
            )
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.shard = read_shard(shard)
        self.replicate_size = replicate_size
        self.tensor_parallel_size = tensor_parallel_size
        self.tensor_parallel_plan = read_plan(tensor_parallel_plan) if tensor_parallel_size > 1 else None
        self.reshard_after_forward = read_resharding(reshard_after_forward)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.async_checkpoints = async_checkpoints
        self.unit_names: tuple[str, ...] = ()
        self._collective_timeout = timeout
        self._meshes: tuple[DeviceMesh, DeviceMesh | None] | None = None
        self._ranks_alike: RankConsistencyCheck | None = None
        self._background: BackgroundShards | None = None
        self._written = AsyncAnyRank()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``Trainer(strategy="mp_fsdp2")``."""
        if "mp_fsdp2" not in strategy_registry:
            strategy_registry.register("mp_fsdp2", cls, description="FSDP2 of any LightningModule by blocks")

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Starts the process group and lays out the ranks: copies, shards, and innermost tensor parallel."""
        ranks = self.num_nodes * self.num_processes
        parts = self.replicate_size * self.tensor_parallel_size
        if ranks % parts:
            raise ValueError(
                f"FSDP2Strategy(replicate_size={self.replicate_size}, tensor_parallel_size={self.tensor_parallel_size})"
                f" needs a multiple of {parts} ranks, and the Trainer has {ranks} (devices x num_nodes)."
            )
        tensor_size = self.tensor_parallel_size
        mesh = private_sharding_api.set_up_environment_on(
            self, lambda: self._mesh({"data_parallel": ranks // tensor_size, "tensor_parallel": tensor_size})
        )
        data = mesh["data_parallel"]
        if self.replicate_size > 1:
            mesh = self._mesh(
                {"replicate": self.replicate_size, "shard": ranks // parts, "tensor_parallel": tensor_size}
            )
            data = mesh["replicate", "shard"]
        self._meshes = (data, mesh["tensor_parallel"] if tensor_size > 1 else None)

    def _mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        return named_mesh(self.root_device.type, sizes, self._collective_timeout)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        """Shards the model, then lets the precision plugin and the optimizers see it."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        why = "looks at one mesh of ranks only, and ranks would skip different steps"
        refuse_scaler_of_torch(self.precision_plugin, "FSDP2Strategy", why)
        refuse_copies_of_the_model(trainer, "FSDP2Strategy", "it is sharded and could not average shards into it")
        refuse_sync_batchnorm(self, "FSDP2Strategy", "whose statistics would be of one rank's samples")
        self._check_checkpoint_io()
        module = self.lightning_module
        RankSettings.compare(trainer, module)
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            self._check_earlier_sharding(module)
        else:
            self._shard(module)
        patches = Patches.of(trainer)
        gather_in_steps(module, patches)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        BufferBroadcast.attach(trainer, self._meshes[0].get_all_groups() if self._meshes is not None else [])
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            ResumableProgress.attach(trainer)
            self.setup_optimizers(trainer)
            refuse_without_dtensors(*self.optimizers)
            if not self.save_distributed_checkpoint:
                refuse_whole_checkpoints(self.optimizers, "FSDP2Strategy")
            self._ranks_alike = RankConsistencyCheck(trainer, self.optimizers)
            if self.async_checkpoints:
                owner = "FSDP2Strategy(async_checkpoints=True)"
                self._background = BackgroundShards(gloo_group(self._collective_timeout, owner))
        self.setup_precision_plugin()  # after the optimizers, to which master weights attach
        if self.tensor_parallel_size > 1:
            let_clip_over_meshes(self.precision_plugin, patches)
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise they are those of an earlier fit
            convert_optimizer_states(module, self.optimizers)  # after the hooks of the precision plugin

    def _shard(self, module: "pl.LightningModule") -> None:
        assert self._meshes is not None
        refuse_own_parallelism(module, "FSDP2Strategy")
        names = unit_names(module, self.shard)
        data, tensor = self._meshes
        styles = resolve_plan(module, self.tensor_parallel_plan) if self.tensor_parallel_plan is not None else {}
        check_divisible(module, styles, self.tensor_parallel_size)
        check_sequence_styles(module, styles)
        shard_model(
            module,
            names,
            TensorParallelSplit(module, styles, tensor) if tensor is not None else None,
            data_mesh=data,
            plugin=self.precision_plugin,
            device=self.root_device,
            reshard_after_forward=self.reshard_after_forward,
        )
        self.unit_names = tuple(names)
        self._report_setup(module, styles)

    def _report_setup(self, module: "pl.LightningModule", styles: Mapping[str, Style]) -> None:
        modules = dict(named_modules(module))
        # fully_shard puts its own class before that of the module
        classes = sorted({type(modules[name]).__bases__[-1].__name__ for name in self.unit_names})
        units = f"{len(self.unit_names)} units of class {', '.join(classes)}, and the rest" if classes else "one unit"
        shards = self.world_size // self.replicate_size // self.tensor_parallel_size
        text = f"FSDP2Strategy: {units}, each over {shards} rank{'s' if shards > 1 else ''}"
        if self.replicate_size > 1:
            text += f", in {self.replicate_size} copies"
        split = [style for style in styles.values() if style not in ("sequence", "whole_sequence")]
        if split:
            text += f"; {len(split)} layers split over {self.tensor_parallel_size} ranks"
        if "sequence" in styles.values():
            text += ", and the sequence between them"
        if self.world_size == 1:
            text += ": nothing is sharded, and it saves no memory"
        rank_zero_info(f"{text}.")

    def _check_checkpoint_io(self) -> None:
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise MisconfigurationException(
                "FSDP2Strategy renames a checkpoint when it is written, and AsyncCheckpointIO would write it later, in"
                " the background; folders with shards do not go through it at all. Leave AsyncCheckpointIO out;"
                " FSDP2Strategy(async_checkpoints=True) writes them in the background."
            )

    def _check_earlier_sharding(self, module: "pl.LightningModule") -> None:
        """A second run of the same module, or one that shards itself, keeps its shards."""
        check_earlier_layout(
            module, {"tensor_parallel": self.tensor_parallel_size, "replicate": self.replicate_size}, "FSDP2Strategy"
        )
        clear_failed_step(module)
        units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        rounded = [dtype for unit in units if (dtype := private_sharding_api.sharding_param_dtype(unit)) is not None]
        precision = str(self.precision_plugin.precision)
        if rounded and rounded[0] != low_dtype(precision):
            raise MisconfigurationException(
                f"The model is sharded already and gathers weights in {rounded[0]}, and precision is now {precision!r}."
                " Use the precision that it was sharded for, or a new model."
            )

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raises what went wrong in the background, in the same step on all ranks."""
        background = self._background
        # Any rank's answer will do: the others end with the same outcome, in a moment.
        if background is not None and background.in_flight and self._written.ask(background.is_done, self.root_device):
            background.finish_write()

    @override
    def on_validation_end(self) -> None:
        """Frees the weights that are gathered for a whole step, since no backward has done so."""
        self._free_gathered_weights()

    @override
    def on_train_end(self) -> None:
        """Checks that ranks agreed in the last step as well, and waits for the last checkpoint."""
        self._flush_ranks()
        self._wait_for_checkpoint()

    @override
    def on_test_end(self) -> None:
        """Frees them, as after a validation."""
        self._free_gathered_weights()

    @override
    def on_predict_end(self) -> None:
        """Frees them, as after a validation."""
        self._free_gathered_weights()

    def _wait_for_checkpoint(self) -> None:
        if self._background is not None:
            self._background.wait()

    def _flush_ranks(self) -> None:
        if self._ranks_alike is not None:
            self._ranks_alike.flush_pending()

    def _free_gathered_weights(self) -> None:
        for part in self.lightning_module.modules() if self.lightning_module is not None else ():
            if isinstance(part, FSDPModule):
                part.reshard()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    #: Says to AtomicCheckpoints that there is nothing left to do.
    writes_atomically = True

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The shards, or on rank 0 the whole, with parameters in the order of the optimizer."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.lightning_module is not None:
            convert_optimizer_states(self.lightning_module, [inner])  # it may have been made inside the fit
        if not self.save_distributed_checkpoint:
            return full_optimizer_state(inner, keep=self.is_global_zero)
        with without_synthetic_step(inner):
            return super().optimizer_state(inner)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes under a temporary name, and renames it when all ranks are done."""
        self._flush_ranks()  # if ranks ran different layers, these weights are worth nothing
        path = self._local(self.broadcast(filepath))
        if self._background is not None and storage_options is None:
            states = checkpoint.pop("optimizer_states", [])
            shards = {"state_dict": checkpoint.pop("state_dict")}
            shards.update({f"optimizer_{number}": state for number, state in enumerate(states)})
            self._background.save(shards, checkpoint, path)
            self._written = AsyncAnyRank()  # an answer that is on its way is about the write before
            return
        if self.is_global_zero:
            begin_checkpoint(path)
        self.barrier()  # no rank writes into a folder that rank 0 still clears
        super().save_checkpoint(checkpoint, temporary_path(path), storage_options)
        self.barrier()  # only a folder with the shards of all ranks gets its name
        if self.is_global_zero:
            commit_checkpoint(path)
        self.barrier()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads shards or a single file, written by any number of ranks."""
        assert self.model is not None
        assert self.lightning_module is not None
        self._wait_for_checkpoint()
        path = existing_checkpoint(self._local(self.broadcast(checkpoint_path)))
        checkpoint = load_checkpoint(
            path, self.model, self.optimizers, strict=self.lightning_module.strict_loading, weights_only=weights_only
        )
        self.barrier()  # no rank still reads under the name that rank 0 may change
        if self.is_global_zero:
            recover_checkpoint(path)
        return checkpoint

    def _local(self, path: str | os.PathLike[str]) -> Path:
        if not is_local(path):
            raise MisconfigurationException(
                f"FSDP2Strategy writes and reads checkpoints on a mounted file system only, and {os.fspath(path)!r} is"
                " none: it would become a local folder. Give a local path (dirpath of ModelCheckpoint,"
                " default_root_dir), and copy checkpoints when they are complete."
            )
        return Path(path)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Renames it first, so that no part of it looks like a checkpoint."""
        if self.is_global_zero:
            (remove_checkpoint if self._background is None else self._background.remove)(Path(filepath))

    @override
    def teardown(self) -> None:
        """The model stays sharded. After an exception or a signal, waits for the checkpoint that is being written."""
        self._ranks_alike = None
        background, self._background = self._background, None
        try:
            if background is not None:
                background.close()
        finally:
            super().teardown()


FSDP2Strategy.register_strategies(StrategyRegistry)


def check_earlier_layout(module: nn.Module, wanted: Mapping[str, int], owner: str) -> None:
    """A second run of the same module keeps its layout."""
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            sizes.update(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if not sizes.keys() & {"data_parallel", *wanted}:
        return
    for name, size in wanted.items():
        earlier = sizes.get(name, 1)
        if earlier != size:
            raise MisconfigurationException(
                f"The model is sharded already (by configure_model, or an earlier run) with {name}_size={earlier}, and"
                f" {owner} now has {name}_size={size}. Use the sizes that it was sharded with, or make a new model and"
                " load its checkpoint."
            )


def clear_failed_step(module: nn.Module) -> None:
    """Frees weights that an exception has left gathered in the middle of a forward or backward, and their gradients.

    Before torch 2.13, which has ``FSDPModule.reset_iter_state``, weights that are gathered for a whole step stay so.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.grad = None  # a backward that comes would add to it
    for part in _outermost_units(module):
        getattr(part, "reset_iter_state", part.reshard)()


def _outermost_units(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost_units(child)
