"""Lightning's DDP with gradients reduced in 16 bit, on any device and by name."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_mp.ground.core.namespace_hint import NamespaceHint
from lightning_mp.training.gradients.comm_hook import ReducedDtype, reduced_precision_hook


class ReducedPrecisionDDPStrategy(NamespaceHint, DDPStrategy):
    """``DDPStrategy`` with a :func:`~lightning_mp.training.gradients.comm_hook.reduced_precision_hook`.

    Also by name: ``Trainer(strategy="mp_ddp_bf16_reduce")`` and ``"mp_ddp_fp16_reduce"``, once ``lightning_mp`` is
    imported. Unlike ``DDPStrategy(ddp_comm_hook=...)``, which silently ignores the hook on anything but CUDA, it
    reduces in 16 bit on every device.

    Args:
        dtype: ``torch.bfloat16`` or "bf16", ``torch.float16`` or "fp16".
        **kwargs: arguments of ``DDPStrategy``, except ``ddp_comm_hook`` and ``ddp_comm_wrapper``.

    Raises:
        ValueError: if ``dtype`` is neither.
        MisconfigurationException: if another hook is given as well; at set-up of a fit, if gradients are to be reduced
            in fp16 and no plugin scales the loss.

    Example:
        >>> from lightning_mp.strategies import ReducedPrecisionDDPStrategy
        >>> strategy = ReducedPrecisionDDPStrategy("bf16", gradient_as_bucket_view=True)
    """

    kind = "strategy"

    def __init__(self, dtype: ReducedDtype, **kwargs: Any) -> None:
        self._hook = reduced_precision_hook(dtype)
        for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
            if kwargs.get(name) is not None:
                raise MisconfigurationException(
                    f"ReducedPrecisionDDPStrategy({dtype!r}, {name}={kwargs[name]!r}): it already has a communication"
                    f" hook. Leave {name} out, or use DDPStrategy."
                )
        super().__init__(**kwargs, ddp_comm_hook=self._hook)
        self.dtype: ReducedDtype = dtype
        self._kwargs = kwargs

    @override
    def configure_ddp(self) -> None:
        """Wraps the module and registers the hook where Lightning does not."""
        if self._hook is reduced_precision_hook(torch.float16):
            self._check_scaler()
        super().configure_ddp()
        # On CUDA Lightning has registered it.
        if self.root_device.type != "cuda":
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(None, self._hook)

    def _check_scaler(self) -> None:
        if getattr(self.precision_plugin, "scaler", None) is None:
            raise MisconfigurationException(
                "Gradients are to be reduced in fp16, and nothing scales the loss"
                f" ({type(self.precision_plugin).__name__} has no scaler): small gradients would become zero, and large"
                " ones infinite weights. Use AutocastPrecision('16-mixed') or MasterWeightsPrecision('16-true'), or"
                " reduce in bf16."
            )


for _name, _dtype in (("mp_ddp_bf16_reduce", "bf16"), ("mp_ddp_fp16_reduce", "fp16")):
    StrategyRegistry.register(
        _name,
        ReducedPrecisionDDPStrategy,
        description=f"DDP with gradients reduced over ranks in {_dtype}",
        override=True,
        dtype=_dtype,
    )
