"""Wrong arguments of planning: quantities, scaling laws, runs, memory by formulas, layouts, recommendations."""

import json
import math
import re
from pathlib import Path
from typing import Any

from refusing import Each, Refusal, refusals

from lightning_mp import recommend
from lightning_mp.ground.core.quantities import parse_quantity
from lightning_mp.planning import (
    DecoderConfig,
    DecoderSize,
    ParallelLayout,
    decoder_memory,
    find_machine,
    run_time,
    tokens_for,
    training_flops,
    training_run,
)
from lightning_mp.planning.layouts import Machine, bubble_fraction, plan_parallelism
from lightning_mp.planning.scaling_laws.fit import fit_scaling_law
from lightning_mp.planning.scaling_laws.optimum import compute_optimal
from lightning_mp.planning.scaling_laws.runs import Run, read_runs
from lightning_mp.planning.scaling_laws.scaling_law import LAWS, ExponentialDecay, ParametricLaw, TrainedRange

CONFIGS = json.loads((Path(__file__).resolve().parents[1] / "support" / "published_configs.json").read_text())
LLAMA_3_8B = CONFIGS["llama_3_8b"]
LLAMA_2_7B = DecoderConfig(layers=32, width=4096, heads=32, ffn_width=11008, vocabulary=32000)
SIZE = DecoderSize.of(6_738_415_616, layers=32, width=4096, vocabulary=32000)
TINY = {"layers": 1, "width": 8, "vocabulary": 8}
NOT_POSITIVE = Each([0, -1, math.inf, math.nan])
ON_A100 = {"device": "A100"}
UNREADABLE = [
    *("20 billions", "20Bn", "20G", "1,000", "1.3.4B", "", "B", "1__0", "_1", "1e", "1e2.5", "0x10", "1 000"),
    *("2e9 B B", "twenty", True, None, [1], {}),
]
NO_COUNT = Each([0, -1, 2.5, True, "4"])
CONSTANTS = {"E": 1.0, "A": 1.0, "B": 1.0, "alpha": 0.5, "beta": 0.5}
LAW: dict[str, Any] = {"name": "", "source": "", "counts": "", "trained": TrainedRange((1e8, 1e10), (1e9, 1e11))}
RUN = {"N": 1e8, "D": 2e9, "loss": 3.2}
RUNS = [Run(n, d, LAWS["besiroglu"].loss(n, d)) for n in (1e8, 1e9, 1e10) for d in (2e9, 2e10, 2e11)]


REFUSED = {
    tokens_for: [
        *[((bad,), "`parameters` must be a positive finite number, got") for bad in NOT_POSITIVE],
        *[((10, bad), "`tokens_per_parameter` must be a positive finite number, got") for bad in NOT_POSITIVE],
        ((10, 0.01), "less than one token. Pass a larger `tokens_per_parameter`"),
    ],
    training_flops: [((10, bad), "`tokens` must be a positive finite number, got") for bad in NOT_POSITIVE],
    ExponentialDecay: [
        ({name: Each([0, -1.0, math.nan, math.inf])}, f"`{name}` must be a positive finite number")
        for name in ("tokens_decay", "parameters_decay")
    ],
    compute_optimal: [
        ({name: 1e200, "law": "hoffmann-1"}, f"1e200 {name} cost more FLOPs under 'hoffmann-1' than a float can hold")
        for name in ("parameters", "tokens")
    ],
    ParametricLaw: [
        (LAW | CONSTANTS | {name: bad}, rf"ParametricLaw\({name}={bad}\): it must be a positive finite number")
        for name in CONSTANTS
        for bad in (0.0, -1.0, math.nan, math.inf)
    ],
    fit_scaling_law: [
        (RUNS[:5], "A law of 5 constants needs at least 6 runs, got 5"),
        ([], "needs at least 6 runs, got 0"),
        ([Run(n, d * 1e9, 3.0) for n in (1e8, 1e9) for d in (1, 2, 3, 4)], "The runs have 2 different model sizes"),
        ([Run(n * 1e8, 1e9, 3.0) for n in range(1, 9)], "The runs have 1 different run lengths in tokens"),
        ({"runs": RUNS, "bootstrap_samples": 99}, "`bootstrap_samples` must be a whole number, 100 or more, got 99"),
        ({"runs": RUNS, "bootstrap_samples": 1e3}, "`bootstrap_samples` must be a whole number, 100 or more"),
        ({"runs": RUNS, "confidence": 95}, "`confidence` must lie between 0 and 1, got 95. For 95%, write 0.95"),
        ({"runs": RUNS, "confidence": math.nan}, "`confidence` must lie between 0 and 1"),
    ],
    read_runs: [
        ([RUN, RUN | {"loss": -1}], "run 2: `loss` must be a positive finite number, got -1"),
        ([RUN, {"D": 2e9, "loss": 3.2}], "run 2 has no column parameters"),
    ],
    Run: [({"parameters": 1.0, "tokens": 1.0, "loss": 0}, r"Run\(loss=0.*\): it must be a positive finite number")],
    DecoderConfig: [
        (TINY | {"layers": 0}, "`layers` must be a whole number, 1 or more, got 0"),
        (TINY | {"heads": 4, "kv_heads": 3}, "must be a multiple of `kv_heads`"),
        (
            TINY | {"experts": 2, "active_experts": 3},
            re.escape("`active_experts` (3) must be at most `experts`, got 2"),
        ),
    ],
    DecoderConfig.from_hugging_face: [
        ((config,), rf"(?=.*onfiguration).*{re.escape(words)}")
        for config, words in (
            ({"n_layer": 2}, "does not contain hidden_size, num_attention_heads, vocab_size"),
            (
                {"model_type": "t5", "is_encoder_decoder": True},
                "describes t5, which has an encoder; the formulas are for decoders",
            ),
            (LLAMA_3_8B | {"model_type": "bert"}, "describes bert, which has an encoder"),
            (
                LLAMA_3_8B | {"model_type": "jamba", "mamba_d_state": 16},
                "contains 'mamba_d_state': its blocks are not attention",
            ),
            (LLAMA_3_8B | {"num_attention_heads": None}, "does not contain num_attention_heads"),
            (LLAMA_3_8B | {"intermediate_size": [1, 2]}, "intermediate_size must be a whole number, got [1, 2]"),
            (
                LLAMA_3_8B | {"kv_lora_rank": 512},
                "contains kv_lora_rank, but not qk_nope_head_dim, qk_rope_head_dim, v_head",
            ),
        )
    ],
    training_run: [({"parameters": 1}, "Pass exactly two of `parameters`, `tokens` and `flops`")],
    run_time: [({"flops": 1, "device": "t4", "dtype": "bf16"}, "No bf16 peak is known for T4")],
    decoder_memory: [
        (
            {"config": LLAMA_2_7B, "layout": ParallelLayout(stages=5), "context_tokens": 1},
            re.escape("`layers` (32) cannot be divided evenly over 5 stages"),
        )
    ],
    plan_parallelism: [
        (
            {"size": SIZE, "layout": ParallelLayout(copies=64), "machine": "DGX H100", "context_tokens": 4096}
            | {"tokens_per_step": Each([65536, 65 * 4096])},
            r"`tokens_per_step` \((65,536|266,240)\) is not a multiple of 4,096 tokens",
        ),
    ],
    find_machine: [("TPU", r"`machine` 'TPU' is not known. Known: DGX A100")],
    DecoderSize.of: [
        (
            {"parameters": 1_000_000, "layers": 32, "width": 4096, "vocabulary": 32000},
            r"`parameters` \(1000000\) leaves nothing for 32 blocks",
        )
    ],
    Machine: [(("mine", "A100", 0, 1, 1), r"Machine\(gpus_per_node=0\): it must be a positive finite number")],
    DecoderSize: [((0, 1, 1, 1, 1, 1), r"DecoderSize\(layers=0\): it must be a whole number, 1 or more")],
    bubble_fraction: [
        *[((bad, 4), "`stages` must be a whole number, 1 or more, got ") for bad in NO_COUNT],
        *[((4, bad), "`micro_batches` must be a whole number, 1 or more, got ") for bad in NO_COUNT],
    ],
    recommend: [
        (ON_A100 | arguments, rf"(?=.*`\w+`).*{re.escape(words)}")
        for arguments, words in (
            ({"device": "h900"}, "`device` 'h900' is not known. Similar: H800 SXM, H200 SXM"),
            ({"goal": "distill"}, "`goal` must be one of pretrain, finetune, adapters, gan, inference, got 'distill'"),
            ({"gpus": 0}, "`gpus` must be a whole number, 1 or more, got 0"),
            ({"device": "mps", "gpus": 2}, "`gpus` is for CUDA devices, got 2 of MPS. Leave it out"),
            ({"model": "7 Bn"}, "`model` cannot be read, got '7 Bn'"),
            ({"memory_bytes": -1}, "`memory_bytes` must be a positive finite number of bytes, got -1"),
            ({"memory_bytes": 80}, "`memory_bytes` of 80 is less than a megabyte. Give 80e9 for 80 GB"),
            ({"goal": "gan", "tokens_per_step": "1M"}, "`tokens_per_step` cannot be used with goal 'gan': a GAN steps"),
            ({"goal": "inference", "tokens_per_step": 1}, "inference has no optimizer step. Leave it out"),
            ({"gpus": 8, "tokens_per_step": 4096}, "is less than one sequence on every GPU (8 x 4096 = 32768)"),
        )
    ],
    parse_quantity: [
        *[
            (
                (text, "tokens"),
                rf"(?=.*{re.escape(repr(text))})`tokens` cannot be read, got .*1\.3B, 20e9 or 300_000_000",
            )
            for text in UNREADABLE
        ],
        *[
            ((bad, "flops"), "`flops` must be a positive finite number, got")
            for bad in (*NOT_POSITIVE, "0", "-3B", "0.0K", "-1e21", -math.inf, "nan", "inf", "-Infinity", "1e999")
        ],
    ],
}


@refusals(REFUSED)
def test_arguments(refusal: Refusal) -> None:
    refusal.check()
