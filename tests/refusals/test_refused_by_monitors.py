"""Wrong arguments of what observes and compares runs: monitors, metrics, comparison, measured memory."""

import math
import re

import torch
from refusing import Each, Refusal, refusals
from torch import nn
from torch.utils.data import DataLoader

from lightning_mp import (
    BudgetForecast,
    GradientNoiseScale,
    MFUMonitor,
    OverflowMonitor,
    OverflowPostMortem,
    PrecisionAudit,
    UnderflowMonitor,
    estimate_memory,
)
from lightning_mp.metrics import TokenPerplexity, UnderflowFraction
from lightning_mp.monitors.comparison.paired_difference import PairedDifference, differences_of
from lightning_mp.monitors.comparison.trial import TrainingData
from lightning_mp.monitors.diagnostics.forecast import forecast_loss, forecast_seconds
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentHistogram, narrow_format

NAN = math.nan
FLAT = {"tokens": range(1, 60), "losses": [1.0] * 59, "at_tokens": 1e9}
FEW = "needs 20 points or more"
LAYERS = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
MEMORY = {"module": LAYERS, "batch": torch.zeros(64, 64)}


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().item())


REFUSED = {
    BudgetForecast: [
        ({"metric": "loss", "every_n_steps": 0}, "every_n_steps=0.: it must be a whole"),
        ({"metric": "loss", "confidence": 1.0}, "confidence=1.0.: it must"),
    ],
    OverflowMonitor: [
        (
            {"stop_after_skips": Each([0, -1, 2.5, "3", True])},
            "a whole number of skipped steps in a row, 1 or more. 'auto' is the default",
        )
    ],
    OverflowPostMortem: [
        (
            {"replay": True, "max_replays": Each([0, True, 1.5])},
            "max_replays=.*whole number of skipped steps, 1 or more",
        ),
        ({"replay": "yes"}, "replay='yes'.*must be True or False"),
    ],
    GradientNoiseScale: [
        ({"count": 5}, r"GradientNoiseScale\(count=5\): it must be a function"),
        ({"average_steps": Each([1, -3, 2.5, True, "100"])}, "must be a whole number of optimizer steps, 2 or more"),
    ],
    PrecisionAudit: [
        (
            {"batch": Each([-1, 1.5, True, "0"])},
            "it must be a whole number, 0 or more. Training batches are counted from 0",
        )
    ],
    UnderflowMonitor: [
        ({"format": "fp32"}, "cannot tell what fp32 would lose. Use one of tf32, bf16, fp16"),
        ({"format": "half"}, "Unknown number format 'half'. Use one of"),
        ({"every_n_steps": 0}, r"UnderflowMonitor\(every_n_steps=0\): it must be a whole number of optimizer steps"),
        ({"every_n_steps": 1.5}, r"UnderflowMonitor\(every_n_steps=1.5\): it must be a whole number"),
        ({"scale": 0.0}, r"UnderflowMonitor\(scale=0.0\): it must be a positive finite number. None takes"),
        ({"scale": math.inf}, r"UnderflowMonitor\(scale=inf\): it must be a positive finite number"),
        ({"watch": ("weights",)}, r"watch=\('weights',\)\) is not valid: it must name one or more of \('gradients', "),
        ({"watch": ()}, r"UnderflowMonitor\(watch=\(\)\) is not valid"),
    ],
    MFUMonitor: [
        ({"flops_per_token": "8N"}, r"must be a number or one of \('exact', '6N', 'palm', 'megatron'\)"),
        ({"flops_per_token": 0}, r"MFUMonitor\(flops_per_token=0\): it must be a positive finite number"),
        ({"flops_per_token": True}, "must be a positive finite number"),
        ({"peak_flops": -1.0}, r"MFUMonitor\(peak_flops=-1.0\): it must be a positive finite number"),
        ({"peak_flops": NAN}, "must be a positive finite number"),
        ({"window": 0}, r"MFUMonitor\(window=0\): it must be a whole number of optimizer steps"),
        ({"count": 3}, "must be a function from a batch"),
        ({"unit": "image"}, r"unit='image'\) is unknown; it must be one of \('auto', 'token', 'sample'\)"),
        ({"unit": "sample", "flops_per_token": "6N"}, "counts per token, and samples are counted here. Use 'exact'"),
    ],
    narrow_format: [
        (
            Each(["fp32", "fp64", torch.float64]),
            r"cannot tell what fp\d\d would lose. Use one of tf32, bf16, fp16, fp8_e4m3fn",
        )
    ],
    ExponentHistogram().fraction_lost: [
        (("fp16", scale), r"`scale` must be a power of two, got .* ExponentHistogram.of\(values, scale\)")
        for scale in (3.0, 0.0, -2.0, math.inf, NAN)
    ],
    forecast_loss: [
        (FLAT | {"tokens": [1.0] * 3, "losses": [1.0] * 2}, "got 3 token counts and 2 losses; give one for each"),
        (
            FLAT | {"tokens": range(1, 15), "losses": [1.0] * 14},
            rf"{FEW} with a finite loss after the first 5%.*got 14",
        ),
        (FLAT | {"losses": [NAN] * 59}, f"{FEW}.*got 0"),
        (
            FLAT | {"tokens": range(100, 200), "losses": [1.0] * 100},
            "over a factor of 3 in tokens, got a factor of 1.99",
        ),
        (FLAT | {"tokens": [], "losses": []}, f"{FEW}.*got 0"),
        (FLAT | {"tokens": [3.0, 2.0], "losses": [1.0, 1.0]}, "must be positive and must not fall"),
        (FLAT | {"tokens": [0.0, 2.0], "losses": [1.0, 1.0]}, "must be positive and must not fall"),
        (FLAT | {"at_tokens": 30}, r"not before the last point \(59 tokens\), got 30"),
        (FLAT | {"confidence": 90}, "`confidence` must be over 0 and below 1, got 90"),
        (FLAT | {"samples": 1}, "`samples` must be 20 or more, got 1"),
    ],
    forecast_seconds: [
        (([1.0], [1.0], 100), "needs two points or more with as many seconds as tokens, got 1 and 1"),
        (([1.0, 2.0], [5, 5], 100), "needs progress"),
    ],
    TokenPerplexity: [
        ({"ignore_index": "pad"}, r"TokenPerplexity\(ignore_index='pad'\) is not valid: it must be an integer")
    ],
    TokenPerplexity().update: [
        ((torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long)), r"got \(2, 3, 5\) and \(2, 4\)\. A next-token"),
        ((torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long)), "`logits` must be floating point"),
        ((torch.zeros(2, 5), torch.zeros(2)), "`target` must hold token ids as integers, got dtype torch.float32"),
    ],
    UnderflowFraction: [("fp17", r"Unknown number format 'fp17'\. Use one of fp64, fp32")],
    UnderflowFraction().update: [
        (torch.arange(3), r"must be a floating-point tensor, got dtype torch.int64\. Call `.float\(\)`")
    ],
    PairedDifference: [
        ({"differences": ()}, "given no differences. Pass one per seed"),
        (
            {"differences": (0.0,), "margin": 0.0},
            "`margin` must be a positive finite number in the unit of the loss, got 0.0",
        ),
        ({"differences": (0.0,), "margin": NAN}, "`margin` must be a positive finite number"),
        ({"differences": (0.0,), "confidence": 95}, "`confidence` must be from 0.5 to below 1, such as 0.95, got 95"),
    ],
    differences_of: [(((1.0, 1.0), (NAN, 1.0)), "1 of 2 baseline runs diverged")],
    TrainingData: [
        ((data,), r"`data` is a (dict|list) with a DataLoader in it.* Pass CombinedLoader")
        for data in ({"a": DataLoader([1])}, [DataLoader([1]), DataLoader([1])])
    ],
    estimate_memory: [
        (MEMORY | arguments, re.escape(words))
        for arguments, words in (
            ({"module": 3}, "`module` must be a torch.nn.Module, got 3"),
            ({"precision": "fp4"}, "`precision` 'fp4' is not known. Use one of 32-true, 16-mixed, bf16-mixed"),
            ({"strategy": "ddp2"}, "`strategy` 'ddp2' is not known. Use one of single, ddp, fsdp2"),
            ({"precision": "fp8"}, "`precision` 'fp8' is not known. Did you mean 'fp8-mixed'? Use one of 32-true"),
            ({"batch": None}, "`batch` must be one batch, got NoneType. Pass next(iter(loader))"),
            ({"batch": DataLoader([1])}, "`batch` must be one batch, got DataLoader. Pass next(iter(loader))"),
            ({"ranks": 0}, "`ranks` must be a whole number, 1 or more, got 0"),
            ({"ranks": 2}, "`ranks` is 2 and `strategy` is 'single'. Pass strategy='ddp'"),
            ({"policy": {"op:norms": "fp32"}}, "`policy` needs a precision that has one, got '32-true'"),
            ({"units": "x"}, "`units` belongs to strategy='fsdp2', got strategy='single'"),
            ({"optimizer": "adamx"}, "`optimizer` 'adamx' is not known. Use one of adadelta, "),
            ({"optimizer": lambda parameters: 3}, "`optimizer` must make a torch.optim.Optimizer, got int"),
            ({"optimizer": "adafactor"}, "cannot step Adafactor on fake tensors"),
            ({"optimizer": "lbfgs"}, "estimate_memory() cannot step LBFGS: how often it runs the step"),
            ({"optimizer": "sparseadam"}, "estimate_memory() cannot step SparseAdam on fake tensors"),
            (
                {"step": lambda module, batch: Reads()(module(batch))},
                " in forward reads a value, for instance by .item()",
            ),
            ({"step": lambda module, batch: module(batch).detach()}, "found nothing to differentiate"),
        )
    ]
    + [(MEMORY | {"optimizer": 3}, "`optimizer` must be a class of torch.optim by its name.*got 3")],
}


@refusals(REFUSED)
def test_arguments(refusal: Refusal) -> None:
    refusal.check()
