"""The loss that each precision reaches in the same number of steps, on real text, over several seeds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import mean

import torch
from bench_cells import Workload, our_plugin, stock_plugin
from bench_checks import make_module, train
from bench_schedule import NOT_REACHED, Budget, Part, describe
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_mp import Float8Precision, MasterWeightsPrecision
from lightning_mp.language_model import GPTConfig, HeldOutBatches, TextBatches, load_standard_library

PLUGINS: dict[str, Callable[[str], Precision | None]] = {
    "stock, bf16-mixed": lambda device: stock_plugin("bf16-mixed", device),
    "ours, bf16-mixed": lambda device: our_plugin("bf16-mixed", device),
    "ours, 16-mixed": lambda device: our_plugin("16-mixed", device),
    "ours, bf16-true, fp32 masters": lambda device: MasterWeightsPrecision("bf16-true"),
    "stock, 32-true": lambda device: None,
    "ours, fp8 tensorwise": lambda device: Float8Precision("tensorwise", skip_small=False),
}
BASELINE = "stock, bf16-mixed"
CONFIG, BATCH_SIZE = GPTConfig(layers=6, heads=6, width=384, block_tokens=256), 32
SEEDS = 3
HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 8


def loss_at_equal_steps(workload: Workload, seconds: float, *, toy: bool) -> Part:
    """Each precision for the same steps."""
    steps = 12 if toy else 200
    if not toy:
        workload = replace(workload, config=CONFIG, batch_size=BATCH_SIZE)
    return Part(
        "Loss at equal steps",
        seconds,
        f"{steps} steps of {workload.batch_size} x {workload.config.block_tokens} bytes of the Python standard "
        f"library's source, {workload.config.parameters:,} parameters, eager, AdamW at a constant learning rate. With "
        "each seed all ways begin with the same weights and see the same order. The loss is that of held-out source in "
        "nats per byte, computed in fp32 with the weights of the forward pass: mean over the seeds; beside it the "
        f"difference to {BASELINE}, seed by seed. {SEEDS} seeds tell a broken precision from a sound one, and no "
        "small differences.",
        ("way", "seeds", "loss", "difference: mean, and of each seed"),
        partial(_measure, workload=workload, steps=steps),
    )


def _measure(part: Part, budget: Budget, *, workload: Workload, steps: int) -> None:
    corpus, vocab = load_standard_library(max_bytes=2**23), workload.config.vocab
    # The toy's vocabulary is smaller than the number of bytes.
    training_text, held_out_text = (text % vocab if vocab < 256 else text for text in (corpus.train, corpus.validation))
    held_out = HeldOutBatches(
        held_out_text, batch_size=HELD_OUT_ROWS, block_tokens=workload.config.block_tokens, max_batches=HELD_OUT_BATCHES
    )
    losses: dict[str, list[float]] = {name: [] for name in PLUGINS}
    errors = {} if find_spec("torchao") else {"ours, fp8 tensorwise": "torchao is not installed"}
    for seed in range(SEEDS):
        for name, make_plugin in PLUGINS.items():
            if name in errors:
                continue
            if not budget.allows():
                errors[name] = NOT_REACHED
                continue
            batches = TextBatches(
                training_text,
                batch_size=workload.batch_size,
                block_tokens=workload.config.block_tokens,
                num_batches=steps,
                seed=seed,
            )
            module = make_module(workload, seed=seed)
            try:
                train(module, workload, make_plugin(workload.device.type), batches)
            except Exception as error:
                errors[name] = describe(error)
                continue
            losses[name].append(_held_out_loss(module.model.float().to(workload.device).eval(), held_out))
            module.cpu()
            part.rows[:] = [_row(way, losses, errors.get(way)) for way in PLUGINS]
    part.rows[:] = [_row(way, losses, errors.get(way)) for way in PLUGINS]


def _row(way: str, losses: dict[str, list[float]], error: str | None) -> list[str]:
    found = losses[way]
    differences = [ours - theirs for ours, theirs in zip(found, losses[BASELINE], strict=False)]
    loss = f"{mean(found):.4f}" if found else "-"
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    compared = f"{mean(differences):+.4f} ({each})" if differences and way != BASELINE else "-"
    return [way, str(len(found)), loss, error or compared]


@torch.no_grad()
def _held_out_loss(model: torch.nn.Module, held_out: HeldOutBatches) -> float:
    device = next(model.parameters()).device
    losses: list[Tensor] = [model(ids.to(device), labels.to(device)) for ids, labels in held_out]
    return torch.stack(losses).mean().item()
