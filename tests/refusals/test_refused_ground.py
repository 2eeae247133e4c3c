"""Wrong arguments of what the other packages stand on: formats, counts of FLOPs and parameters, the language model."""

import math

import torch
from refusing import Each, Refusal, refusals
from torch import nn

from lightning_mp.ground.core.number_formats import fraction_lost, number_format
from lightning_mp.ground.flops.flop_counter import count_flops
from lightning_mp.ground.flops.model_shape import module_flops_per_token
from lightning_mp.ground.modules.whole_parameters import whole_parameters
from lightning_mp.language_model import (
    GPT,
    GPTConfig,
    HeldOutBatches,
    LanguageModel,
    TextBatches,
    config_for_parameters,
    generate,
)
from lightning_mp.planning import flops_per_token, model_flops_utilization, peak_flops

CONVENTION = "Unknown FLOPs convention '8N'. Use one of 6N, palm, megatron"
POSITIVE = "`parameters` must be a whole number, 1 or more, got"
SHAPE = {"parameters": 100, "layers": 2, "width": 8, "context_tokens": 4}
TEXT = (torch.arange(1000) % 251).to(torch.uint8)
SMALL_GPT = {"layers": 1, "heads": 1, "width": 16}
WARM_UP = r"LanguageModel\(total_steps=.* the rate warms up within the run\. Give a"

REFUSED = {
    number_format: [(Each(["fp17", torch.int8]), r"Unknown number format .* Use one of fp64, fp32, tf32, bf16, fp16")],
    fraction_lost: [
        *[
            ((torch.ones(1), "fp16", scale), "`scale` must be a positive finite number, got")
            for scale in (0.0, -1.0, math.inf, math.nan)
        ],
        ((torch.ones(1, dtype=torch.int64), "fp16"), r"must be a floating-point tensor, got dtype torch.int64"),
    ],
    flops_per_token: [
        ({"parameters": 1, "convention": "8N"}, rf"{CONVENTION}; count_flops"),
        ({"parameters": Each([0, -1, 1.5, True]), "convention": "6N"}, POSITIVE),
        *[
            (SHAPE | {name: None}, rf"The 'palm' convention \(6 N \+ 12 L H Q T\) needs `{name}`")
            for name in ("layers", "width", "context_tokens")
        ],
        (
            {"parameters": 100, "convention": "6N", "frozen_parameters": 200},
            r"`frozen_parameters` \(200\) cannot be more than `parameters` \(100\)",
        ),
    ],
    model_flops_utilization: [
        ((-1, 1, 1), "`tokens_per_second` must be a finite number of at least 0"),
        ((1, math.nan, 1), "`flops_per_token` must be a finite number of at least 0"),
        ((1, 1, 0), "`peak_flops_per_second` must be a positive finite number"),
    ],
    peak_flops: [
        (("Tesla V100-SXM2-32GB", "tf32"), r"No tf32 peak is known for V100 SXM2\. Known for it: fp32, fp16\."),
        (("NVIDIA A10", torch.float64), r"No fp64 peak is known for A10\. Known for it: fp32, tf32, bf16, fp16\."),
        (("NVIDIA A10", "int8"), "Unknown number format 'int8'"),
    ],
    module_flops_per_token: [
        ((nn.Linear(2, 3), "palm", 1), r"'palm' convention needs the number of layers.*Give the number itself"),
        ((nn.Linear(2, 3), "8N", 1), f"{CONVENTION}, or 'exact'"),
    ],
    count_flops: [
        (
            (nn.Linear(2, 2).requires_grad_(False), torch.zeros(1, 2)),
            "found nothing to differentiate: no output of the step has a gradient",
        ),
        (
            (nn.Linear(2, 2), torch.zeros(1, 3)),
            "must have same reduction dim|shapes cannot be multiplied",  # an error of the module stays what it is
            RuntimeError,
        ),
    ],
    whole_parameters: [
        (nn.Sequential(nn.LazyLinear(3)), r"A parameter of LazyLinear has no shape yet.*Run one batch through")
    ],
    config_for_parameters: [(5000, r"a model of 5000 parameters cannot be built: the smallest has 9264")],
    GPTConfig: [
        ({"layers": 0, "heads": 2, "width": 32}, r"GPTConfig\(layers=0\): it must be a whole number, 1 or more"),
        ({"layers": 2, "heads": 3, "width": 32}, r"GPTConfig\(width=32\): it must be a multiple of the 3 heads"),
    ],
    GPT(GPTConfig(**SMALL_GPT, block_tokens=16)).forward: [
        (torch.zeros(1, 17, dtype=torch.int64), "sequence of 17 tokens was given to a model for at most 16")
    ],
    generate: [((GPT(GPTConfig(**SMALL_GPT)), b"", 3), "empty prompt: give at least one byte")],
    LanguageModel: [
        (SMALL_GPT | {"total_steps": 20}, WARM_UP),
        (SMALL_GPT | {"total_steps": 2, "warmup_steps": 2}, WARM_UP),
        (SMALL_GPT | {"warmup_steps": -1}, WARM_UP),
        (SMALL_GPT | {"total_steps": 0}, r"LanguageModel\(total_steps=0\): it must be a whole number, 1 or more"),
    ],
    TextBatches: [
        (
            {"text": TEXT[:20], "batch_size": 3, "block_tokens": 7},
            r"the text has 2 blocks of 7 tokens, and one batch .* needs 3",
        )
    ],
    HeldOutBatches: [
        (
            {"text": TEXT[:8], "batch_size": 1, "block_tokens": 7, "max_batches": 1, "world_size": 2},
            r"has 1 blocks of 7 tokens, and 2 are needed, one for every rank",
        )
    ],
}


@refusals(REFUSED)
def test_arguments(refusal: Refusal) -> None:
    refusal.check()
