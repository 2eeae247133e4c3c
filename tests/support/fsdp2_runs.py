"""Runs of the demo's language model on one process and under FSDP2Strategy, with the same data in every step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gloo import run_same_ranks
from small_models import WIDTH, Regression, ResumableLoader, fit, loader, quiet_trainer, token_batches
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, OverflowMonitor
from lightning_mp.language_model import LanguageModel
from lightning_mp.strategies.fsdp2 import FSDP2Strategy

VOCABULARY, TOKENS, ROWS = 32, 8, 4


class Recorded(LanguageModel):
    """Remembers the loss of every micro-batch. With this epsilon Adam leaves the rounding of tiny gradients tiny."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.losses.append(output["mean_loss"].item())
        return output

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["eps"] = 1e-3
        return configured


def model() -> Recorded:
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "width": 16, "block_tokens": TOKENS, "vocab": VOCABULARY}
    return Recorded(**sizes, learning_rate=1e-2, warmup_steps=1)


def batches(count: int, data_rank: int = 0, data_ranks: int = 1) -> list[list[Tensor]]:
    """The rows of this rank; together the ranks see the same rows in every step, however many they are."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator)[data_rank::data_ranks]
        found.append([ids[:, :-1], ids[:, 1:]])
    return found


def fp16(scale: float = 1024.0) -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=scale, growth_interval=4))


def fsdp2(*shard: Any, **arguments: Any) -> FSDP2Strategy:
    return FSDP2Strategy(*shard, process_group_backend="gloo", **arguments)


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state.items()}


def runs_in_a_weighted_window(make: Callable[[], Any], strategy: str, *, by_trainer: bool = False) -> list[Any]:
    """``norms`` and weights of a module that clips by itself, in fp16: on one process, and on each of two ranks.

    Its windows have four micro-batches of tokens over all ranks, by the Trainer's argument or by our scheduler.
    """

    def train_on(rank: int, ranks: int = 2) -> tuple[list[float], dict[str, Tensor]]:
        module, rows = make(), token_batches([5, 9, 3, 7, 8, 2, 6, 4])
        plugin = AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=64.0))
        own: Any = "auto" if ranks == 1 else fsdp2() if strategy == "fsdp2" else "ddp"
        windows = [] if by_trainer else [AccumulationScheduler({0: 4 // ranks})]
        arguments = {"accumulate_grad_batches": 4 // ranks} if by_trainer else {}
        fit(module, rows[rank::ranks], *windows, plugin=plugin, devices=ranks, strategy=own, **arguments)
        return module.norms, full_weights(module)

    return [*run_same_ranks(lambda rank: train_on(rank, ranks=1), 1), *run_same_ranks(train_on, 2)]


def train(
    rank: int = 0,
    devices: int = 1,
    strategy: Any = "auto",
    *,
    module: Any = None,
    steps: int = 4,
    batches_in_all: int = 6,
    ckpt_path: Any = None,
    save_to: Any = None,
    plugin: Any = None,
    callbacks: Sequence[Any] = (),
    **arguments: Any,
) -> dict[str, Any]:
    """Everything that must be the same on any number of ranks; losses are means over this rank's rows."""
    module = model() if module is None else module
    monitor = OverflowMonitor()
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        plugins=[fp16() if plugin is None else plugin],
        callbacks=[monitor, *callbacks],
        max_epochs=-1,
        max_steps=steps,
        **arguments,
    )
    parts = getattr(strategy, "tensor_parallel_size", 1)
    rows = batches(batches_in_all, rank // parts, devices // parts)
    trainer.fit(module, ResumableLoader(rows), loader(rows[:1]), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "losses": module.losses,
        "norm": monitor.grad_norm,
        "skipped": monitor.skipped_steps,
        "scale": scaler.get_scale() if scaler is not None else None,
        "steps": trainer.global_step,
        "weights": full_weights(module),
    }


def assert_same(ours: dict[str, Any], reference: dict[str, Any], *, atol: float = 3e-4) -> None:
    """Up to the rounding of fp16 products that are summed in another order."""
    for name in ("skipped", "scale", "steps"):
        assert ours[name] == reference[name], name
    if reference["norm"] is not None:  # stock plugins tell none
        assert abs(ours["norm"] / reference["norm"] - 1) < 1e-3
    assert ours["weights"].keys() == reference["weights"].keys()
    assert_close_by_name(ours["weights"], reference["weights"], atol=atol)


def assert_close_by_name(
    ours: Mapping[Any, Tensor], reference: Mapping[Any, Tensor], *, rtol: float = 1e-5, atol: float
) -> None:
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def optimizer_states(path: Any) -> dict[tuple[int, str], Tensor]:
    """Of the first optimizer of a checkpoint, by number of the parameter and name."""
    states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    return {(index, name): value for index, values in states.items() for name, value in values.items()}


def assert_same_on_ranks(ranks: list[dict[str, Any]]) -> None:
    first, *others = ranks
    for other in others:
        for name in ("norm", "skipped", "scale", "steps"):
            assert other[name] == first[name], name
        for name, value in first["weights"].items():
            assert torch.equal(other["weights"][name], value), name


class PostNorm(nn.Module):
    """Ends with its norm, where a second run stops early."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + nn.functional.dropout(self.up(self.before(x)).relu(), 0.5, self.training))


class Blocks(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(PostNorm(), PostNorm(), nn.Linear(WIDTH, 1))
