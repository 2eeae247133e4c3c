"""FSDP1 on CPU and gloo through Lightning's own strategy, which wants a GPU; for tests only."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)


class CpuFsdp(FSDPStrategy):
    """``FSDPStrategy`` with its arguments honoured on CPU: kinds of sharding, hybrid meshes, both kinds of checkpoints.

    What is different: the CPU is named to torch, meshes lie on the CPU, and full checkpoints are gathered without
    ``offload_to_cpu``, by which torch ends the process on CPU tensors (D43).
    """

    def __init__(self, *, device_mesh: tuple[int, int] | None = None, **arguments: Any) -> None:
        super().__init__(process_group_backend="gloo", **arguments, device_mesh=device_mesh)
        self._mesh_shape = self.kwargs.pop("device_mesh", None)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._mesh_shape is not None:
            self.kwargs["device_mesh"] = init_device_mesh("cpu", self._mesh_shape)

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            module=model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )

    @contextmanager
    def _gathered(self, *, rank0_only: bool) -> Iterator[None]:
        with FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        ):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        with self._gathered(rank0_only=True):
            return self.model.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._state_dict_type == "sharded":
            return super().optimizer_state(optimizer)
        with self._gathered(rank0_only=True):
            state = FullyShardedDataParallel.optim_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))
            if self.global_rank == 0:
                state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
            return state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
        with self._gathered(rank0_only=False):
            self.model.load_state_dict(checkpoint.pop("state_dict"))
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                named = FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_NAME, self.model)
                optimizer.load_state_dict(
                    FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, named)
                )
        return checkpoint
