"""Wrong arguments of what trains: plugins, callbacks, strategies, policies, plans, optimizers, schedules."""

import math
import re
from pathlib import Path
from typing import Any

import fsdp2_runs
import torch
from cpu_fsdp import CpuFsdp
from huggingface_models import HuggingFace
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from refusing import Each, Refusal, refusals
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim import LBFGS, SGD, AdamW

import lightning_mp as mp
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.strategies import ReducedPrecisionDDPStrategy
from lightning_mp.training.gradients.comm_hook import reduced_precision_hook
from lightning_mp.training.gradients.replication import GradientReplication
from lightning_mp.training.lr_schedule.schedules import Cooldown, WarmupCosine, WarmupStableDecay, check_schedule
from lightning_mp.training.policy.float8_layers import choose_float8_layers
from lightning_mp.training.policy.unit_selection import read_shard, unit_names, units_by_size
from lightning_mp.training.precision.masters.checks import check_strategy
from lightning_mp.training.tensor_parallel.plan import check_divisible, read_plan, resolve_plan
from lightning_mp.training.tensor_parallel.sequence_parallel import check_sequence_styles

INF, NAN, M = math.inf, math.nan, MisconfigurationException
SECONDS = "a positive finite number of seconds"
BF16 = "it must be torch.bfloat16 or 'bf16'"
ENTRY = "A threshold is an integer from 0, a number of micro-batches an integer from 1."
WHOLE_TOKENS = "it must be a whole number of tokens"
TP_STYLES = r"one of \('column', 'column_gather', .* 'auto_sequence'\)"
BLOCKS = {"*.blocks": "sequence"}
WHOLE = {"*.attention": "whole_sequence", "*.mlp": "whole_sequence"}
CUT = {"*.query_key_value": "column_qkv", "*.output": "row", "*.up": "column", "*.down": "row"}


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.output = nn.Linear(6, 24), nn.Linear(24, 6)


def split_between(model: nn.Module, plan: Any, ranks: int) -> None:
    check_divisible(model, resolve_plan(model, plan), ranks)


def split_along_the_sequence(model: nn.Module, plan: Any) -> None:
    check_sequence_styles(model, resolve_plan(model, plan))


def blocks_along_the_sequence(blocks: list[nn.Module], styles: Any) -> None:
    check_sequence_styles(nn.ModuleDict({"blocks": nn.ModuleList(blocks)}), {"blocks": "sequence"} | styles)


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


PLUGINS = {
    mp.AutocastPrecision: [
        *[
            (
                precision,
                exactly(
                    f"AutocastPrecision(precision={precision!r}) is unknown; it must be one of ('16-mixed',"
                    f" 'bf16-mixed').{instead}"
                ),
            )
            for precision, instead in [
                *[
                    (p, f" For 16-bit copies of weights use MasterWeightsPrecision({p!r}).")
                    for p in ("16-true", "bf16-true")
                ],
                *[
                    (p, f" Did you mean {meant!r}? For fp32 leave the plugin out: Trainer(precision='32-true').")
                    for meant, near in {
                        "16-mixed": ("fp16", "16", 16, torch.float16, "half", "16_mixed"),
                        "bf16-mixed": ("bf16", "torch.bfloat16", "bfloat16-mixed"),
                    }.items()
                    for p in near
                ],
                *[(p, " For fp32 leave the plugin out: Trainer(precision='32-true').") for p in ("32-true", None)],
            ]
        ],
        (
            {"precision": "bf16-mixed", "scaler": mp.LossScaler("cpu")},
            exactly(
                "AutocastPrecision('bf16-mixed') takes no scaler, got LossScaler: bf16 has the range of fp32."
                " Leave the scaler out, or use '16-mixed'."
            ),
            M,
        ),
        (("16-mixed", None, 1024), r"scaler=1024\): it must be a torch.amp.GradScaler"),
        (("16-mixed", mp.LossScaler("cpu")), "it must be a device type such as"),
        (("bf16-mixed", "banana"), r"device='banana'\): it must be a device type"),
        ({"precision": "bf16-mixed", "fp32_eval_outputs": "yes"}, "fp32_eval_outputs='yes'"),
        (
            {"precision": "bf16-mixed", "eval_precision": "64-true"},
            r"eval_precision='64-true'\) is unknown.*'32-true', '16-mixed', 'bf16-mixed'",
        ),
        (
            {"precision": "bf16-mixed", "policy": "defualt"},
            r"got 'defualt'\. .* a plugin's policy may also be 'default' or None",
            TypeError,
        ),
        (
            {"precision": "bf16-mixed", "policy": {"head": "fp16"}},
            r"rules set fp16 \('head': fp16\).*AutocastPrecision\('16-mixed'\)",
            M,
        ),
    ],
    mp.MasterWeightsPrecision: [
        (
            Each(["bf16-mixed", "16-mixed", "32-true", "bf16"]),
            r"must be one of \('16-true', 'bf16-true'\).*take AutocastPrecision",
        ),
        (
            {"precision": "bf16-true", "storage": "int8"},
            r"storage='int8'\) is unknown; it must be one of \('fp32', 'remainder', '24bit'\)",
        ),
        (
            {"precision": "16-true", "storage": Each(["remainder", "24bit"])},
            "fp16 has a different exponent. Use storage='fp32', or 'bf16",
            M,
        ),
        ({"precision": "16-true", "storage": "remainder"}, "an fp32 number is not an fp16 number plus more bits", M),
        ({"precision": "bf16-true", "scaler": mp.LossScaler()}, "takes no scaler, got LossScaler", M),
        (
            {"precision": "bf16-true", "fp32_checkpoints": False},
            r"fp32_checkpoints=False\): weights are fp32, and so are those of its check",
        ),
    ],
    mp.MasterWeightsPrecision("bf16-true").convert_module: [
        (nn.Linear(1, 1), "is a plugin for lightning.pytorch.Trainer", M)
    ],
    check_strategy: [
        (
            {"strategy": CpuFsdp(), "storage": "24bit", "fp32_gradients": False},
            "storage='24bit'.* cannot be used with CpuFsdp.*FSDP2Strategy",
            M,
        ),
        *[
            (
                {"strategy": object.__new__(FSDPStrategy), "storage": storage, "fp32_gradients": False},
                f"storage='{storage}'.*FSDPStrategy.*use FSDP2Strategy",
                M,
            )
            for storage in ("remainder", "24bit")
        ],
        (
            {"strategy": DDPStrategy(), "storage": "fp32", "fp32_gradients": True},
            "cannot be used with DDPStrategy.*in the dtype of the 16-bit",
            M,
        ),
    ],
    mp.Float8Precision: [
        ("row", r"Float8Precision\(recipe='row'\) is unknown; it must be one of \('tensorwise', 'rowwise', 'row"),
        ("row-wise", r"Did you mean 'rowwise'\?$"),
        ({"policy": {"gate": "fp16"}}, r"rules set fp16 \('gate': fp16\).*AutocastPrecision\('16-mixed'\)", M),
    ],
    choose_float8_layers: [((nn.Sequential(*(nn.Linear(32, 32) for _ in range(25))), ["x"]), r"10, 11 and 13 more\.$")],
    mp.PrecisionPolicy: [
        (([],), r"got no rule\. Give at least one"),
        (Each(["defualt", 3]), "A policy is a mapping of patterns to dtypes, or pairs of them, and got", TypeError),
        (([("head", "fp8")],), r"'head': 'fp8' has no dtype.*one of fp32, bf16, fp16, low"),
        (([("head", "fp64")],), r"'head': 'fp64' has no dtype"),
        (([("head", "tf32")],), r"'head': 'tf32' has no dtype"),
        (
            ([("head", torch.int8)],),
            r"'head': torch\.int8 has no dtype.*torch\.float32, torch\.bfloat16, torch\.float16",
        ),
        (([(3, "fp32")],), r"3: 'fp32' is not a pattern"),
        (([(int, "fp32")],), r"is not a pattern"),
        (([("", "fp32")],), r"is not a pattern"),
        (([("re:bl(ocks", "fp32")],), r"'re:bl\(ocks': fp32 is not a regular expression: "),
        (
            ([("op:soft_max", "fp32")],),
            r"names no operation of torch\. Near misses: .*softmax.*Families are norms, softmax",
        ),
        (([("op:relu_", "fp32")],), r"names no operation of torch"),
        (([("op:xyz_*", "fp32")],), r"names no operation of torch"),
        (
            ([("norms", "fp32"), ("layer_norm", "low")],),
            r"Rule 2 of the policy, 'layer_norm': low, can never win.*rule 1 \('nor",
        ),
        *[
            ((rules,), r"pairs of a pattern and a dtype, or a mapping, and got", TypeError)
            for rules in (["head"], [("head",)], [("head", "fp32", 1)], [3])
        ],
    ],
    mp.LossScaler: [
        ({"device": "cpu", **arguments}, rf"^LossScaler\({re.escape(words)}.*\.$")
        for arguments, words in [
            (
                {"growth_factor": 1.0},
                "growth_factor=1.0) is not valid: growth_factor must be greater than 1; for a constant scale use"
                " LossScaler.static(scale)",
            ),
            ({"growth_factor": NAN}, "growth_factor=nan) is not valid: growth_factor must be greater than 1;"),
            (
                {"backoff_factor": 1.0},
                "backoff_factor=1.0) is not valid: backoff_factor must be between 0 and 1, both excluded",
            ),
            ({"backoff_factor": 0.0}, "backoff_factor=0.0) is not valid: backoff_factor must be between 0 and 1"),
            ({"backoff_factor": NAN}, "backoff_factor=nan) is not valid"),
            (
                {"growth_interval": 0},
                "growth_interval=0) is not valid: growth_interval must be a number of steps, 1 or more",
            ),
            ({"min_scale": -1.0}, "min_scale=-1.0) is not valid: min_scale must be from 0 to max_scale=16777216.0"),
            (
                {"min_scale": 8.0, "max_scale": 4.0},
                "min_scale=8.0) is not valid: min_scale must be from 0 to max_scale=4.0",
            ),
            ({"min_scale": NAN}, "min_scale=nan) is not valid"),
            (
                {"init_scale": 2.0**25},
                "init_scale=33554432.0) is not valid: init_scale must be positive and from"
                " min_scale=5.960464477539063e-08 to 16777216.0, and from 2^-126 to 2^126: it is a float32 number, and"
                " so is its inverse",
            ),
            (
                {"init_scale": 2.0**-127, "min_scale": 0.0},
                "init_scale=5.877471754111438e-39) is not valid: init_scale must be",
            ),
            ({"init_scale": 1e-45, "min_scale": 0.0}, "init_scale=1e-45) is not valid: init_scale must be"),
            (
                {"init_scale": 2.0**127, "max_scale": INF},
                "init_scale=1.7014118346046923e+38) is not valid: init_scale must be",
            ),
            ({"init_scale": 1e39, "max_scale": INF}, "init_scale=1e+39) is not valid: init_scale must be"),
            ({"growth_factor": INF}, "growth_factor=inf) is not valid: growth_factor must be"),
            ({"init_scale": 0.0, "min_scale": 0.0}, "init_scale=0.0) is not valid: init_scale must be positive"),
            ({"init_scale": -1.0}, "init_scale=-1.0) is not valid"),
            ({"init_scale": NAN}, "init_scale=nan) is not valid"),
            ({"init_scale": INF, "max_scale": INF}, "init_scale=inf) is not valid"),
            (
                {"hysteresis": 0},
                "hysteresis=0) is not valid: hysteresis must be 1 (every overflow lowers the scale) or more",
            ),
            (
                {"hysteresis_refill": "never"},
                "hysteresis_refill='never') is not valid: hysteresis_refill must be 'step' or 'growth'",
            ),
            ({"on_floor": "stop"}, "on_floor='stop') is not valid: on_floor must be 'raise', 'warn' or 'ignore'"),
        ]
    ],
}

CALLBACKS = {
    mp.AccumulationScheduler: [
        *[
            (
                (schedule,),
                exactly(f"AccumulationScheduler(schedule={schedule!r}): the entry {entry} is not valid. {ENTRY}"),
            )
            for schedule, entry in [
                ({0: 0}, "0: 0"),
                ({0: 4, 10: -2}, "10: -2"),
                ({-1: 2}, "-1: 2"),
                ({"0": "0"}, "'0': '0'"),
                ({"first": 2}, "'first': 2"),
                ({0: 1.5}, "0: 1.5"),
                ({0: True}, "0: True"),
                ({0: None}, "0: None"),
            ]
        ],
        *[
            (
                (schedule,),
                exactly(
                    f"AccumulationScheduler(schedule={schedule!r}): it must be a mapping from a threshold to the number"
                    " of micro-batches per optimizer step, for instance {0: 1, 1000: 4}."
                ),
            )
            for schedule in ({}, 4, [(0, 4)], "0: 4")
        ],
        (({"0": 1, 0: 2},), "the threshold 0 is given twice"),
    ],
    mp.ChinchillaBudget: [
        ({"tokens": 10.5}, rf"ChinchillaBudget\(tokens=10.5\): {WHOLE_TOKENS}"),
        ({"tokens": "many"}, r"`tokens` cannot be read, got 'many'"),
        ({"tokens": True}, rf"ChinchillaBudget\(tokens=True\): {WHOLE_TOKENS}"),
        ({"tokens_per_parameter": "20"}, r"ChinchillaBudget\(tokens_per_parameter='20'\): .* a positive finite number"),
        ({"count": 3}, "count=3 must be a function"),
    ],
    mp.TokenLearningRate: [
        (Each([WarmupCosine, WarmupStableDecay]), r"(\w+) is a class. Make an instance: \1\(\)"),
        *[
            ({"schedule": WarmupCosine(), **arguments}, words)
            for arguments, words in [
                ({"tokens": 0}, "whole number of tokens, 1 or more"),
                ({"tokens": 1.5}, rf"TokenLearningRate\(tokens=1.5\): {WHOLE_TOKENS}, 1 or more"),
                ({"tokens": "20 billions"}, "`tokens` cannot be read, got '20 billions'"),
                ({"tokens": True}, r"TokenLearningRate\(tokens=True\)"),
                ({"tokens": NAN}, r"TokenLearningRate\(tokens=nan\)"),
                ({"count": 5}, "count=5 must be a function"),
                ({"schedule": 0.1}, r"TokenLearningRate\(schedule=0.1\): it must be a WarmupStableDecay"),
                ({"schedule": lambda fraction: -fraction}, "it gives -0.5 for the fraction 0.5"),
            ]
        ],
    ],
    mp.TokenLearningRate(WarmupCosine()).cooldown_now: [
        ((), r"needs one of tokens and fraction, .*this schedule is WarmupCosine\("),
        ({"tokens": 5, "fraction": 0.1}, "needs one of tokens and fraction"),
        ({"fraction": 1.0}, r"cooldown_now\(fraction=1.0\): it must be a number between 0 and 1"),
        ({"fraction": "a"}, r"cooldown_now\(fraction='a'\): it must be a number between 0 and 1"),
        ({"tokens": 0.5}, rf"cooldown_now\(tokens=0.5\): {WHOLE_TOKENS}"),
    ],
    WarmupStableDecay: [
        *[
            (
                {name: Each([-0.1, 1.5, NAN, INF, "0.1", None, True])},
                rf"WarmupStableDecay\({name}=.*\): it must be a number from 0 to 1",
            )
            for name in ("warmup", "decay", "final", "start")
            if name in WarmupStableDecay.__dataclass_fields__
        ],
        ({"warmup": 0.5, "decay": 0.6}, r"warmup=0.5, decay=0.6\).*they add up to 1 at most"),
        ({"decay": 0}, "decay must be above 0"),
        ({"shape": "sqrt"}, r"shape='sqrt'\) is unknown; it must be one of \('linear', '1-sqrt', 'cos"),
    ],
    WarmupCosine: [
        *[
            (
                {name: Each([-0.1, 1.5, NAN, INF, "0.1", None, True])},
                rf"WarmupCosine\({name}=.*\): it must be a number from 0 to 1",
            )
            for name in ("warmup", "decay", "final", "start")
            if name in WarmupCosine.__dataclass_fields__
        ],
        ({"warmup": 1}, r"WarmupCosine\(warmup=1\) leaves nothing for the cosine"),
    ],
    Cooldown: [({"shape": "sqrt"}, r"shape='sqrt'\) is unknown; it must be one of \('linear', '1-sqrt', 'cos")],
    check_schedule: [
        ("cosine", "it must be a WarmupStableDecay, a WarmupCosine, or a function"),
        (
            lambda fraction: NAN if fraction == 0.5 else 1.0,
            "it gives nan for the fraction 0.5; it must give a finite number from 0",
        ),
    ],
    mp.ActivationCheckpointing: [
        (
            Each([([],), "", 3, None, ([nn.Linear(1, 1)],), nn.Linear(1, 1), ([int],)]),
            "must be a subclass of torch.nn.Module, its name",
        ),
        *[
            (
                {"modules": "blocks.*", "every": every},
                re.escape(f"every={every!r}): it must be a whole number, 1 or more"),
            )
            for every in (0, -1, 1.5, True, "2")
        ],
    ],
    mp.RankWatchdog: [
        ({"timeout_seconds": Each([0, -1, NAN, INF, True])}, rf"RankWatchdog\(timeout_seconds=.*{SECONDS}")
    ],
    mp.StopAtBoundary: [
        ({"signals": ["SIGTERM", "SIGKILL"]}, "no program can catch SIGKILL. Leave it out"),
        ({"signals": []}, "without a signal and without max_seconds nothing would ever stop the run"),
        ({"signals": ["TERM"]}, "'TERM' is not a signal on this platform; give names such as 'SIGTERM'"),
        ({"max_seconds": 0}, rf"max_seconds=0\): it must be {SECONDS}. None"),
        ({"max_seconds": NAN}, rf"max_seconds=nan\): it must be {SECONDS}. None"),
        ({"filename": "{epoch}"}, r"filename='{epoch}'\): it must be a name in which only {step} is filled in"),
        ({"filename": Path("last")}, r"filename=PosixPath\('last'\)\): it must be a name"),
    ],
    latest_checkpoint: [("s3://bucket/run", r"latest_checkpoint\('s3://bucket/run'\): only folders of a mounted")],
}

STRATEGIES = {
    mp.FSDP2Strategy: [
        ({"replicate_size": Each([0, True, 1.5])}, "replicate_size=.*: it must be a whole number of ranks, 1 or more"),
        ({"tensor_parallel_plan": "auto"}, "tensor_parallel_size=1 splits none"),
        (
            {"async_checkpoints": True, "save_distributed_checkpoint": False},
            r"requires single files, which rank 0 gathers and writes. Leave one of them",
        ),
    ],
    read_shard: [
        (
            Each([0, -1, True, 1.5, None, ([],), "", ([1],), nn.Linear(2, 2)]),
            r"FSDP2Strategy\(shard=.*the smallest number of parameters of a unit",
        )
    ],
    units_by_size: [
        ((fsdp2_runs.model(), 1_000_000), r"shard=1000000\): no module .* The largest: model \(6864\), model.blocks")
    ],
    unit_names: [
        (
            (fsdp2_runs.model(), ("model.head",)),
            r"model.head.weight and model.token_embedding.weight are one parameter .*'mo",
        )
    ],
    reduced_precision_hook: [(Each([torch.float32, "float8", None, 16]), rf"reduced_precision_hook\(dtype=.*{BF16}")],
    ReducedPrecisionDDPStrategy: [
        (Each([torch.float32, "float8", None, 16]), "it must be torch.bfloat16"),
        *[
            ({"dtype": "bf16", name: fp16_compress_hook}, f"Leave {name} out, or use DDPStrategy", M)
            for name in ("ddp_comm_hook", "ddp_comm_wrapper")
        ],
    ],
    GradientReplication: [
        (
            (None, ranks_per_parameter, plain_replicas),
            "both must be 1 or more, and plain_replicas must divide ranks_per_parameter",
        )
        for ranks_per_parameter, plain_replicas in [(0, 1), (4, 3), (2, 4), (4, 0)]
    ],
    mp.JointOptimizer: [
        (AdamW([nn.Parameter(torch.ones(2))]), "list of torch.optim optimizers, got one alone"),
        (([LBFGS(nn.Linear(1, 1).parameters())],), "LBFGS evaluates the loss itself", M),
        (([],), r"list of torch\.optim optimizers, got none"),
        (([nn.Sequential()],), r"list of torch\.optim optimizers, got Sequential"),
        (
            (
                [
                    AdamW(mp.matrices_and_rest(Fused(), split={"query_key_value": 3})[0]),
                    SGD(nn.Linear(1, 1).parameters()),
                ],
            ),
            r"AdamW: matrices_and_rest\(split=\.\.\.\) was given",
            M,
        ),
    ],
    mp.matrices_and_rest: [
        ({"module": Fused(), "split": split}, words)
        for split, words in [
            (
                {"attention": 3},
                "'attention' matches no matrix, nor a layer whose weight is one.*query_key_value.weight",
            ),
            ({"query_key_value": 5}, "query_key_value.weight has 24 outputs, which do not divide as 5 says"),
            ({"query_key_value": (16, 4, 3)}, r"24 outputs, which do not divide as \(16, 4, 3\) says"),
            ({"query_key_value": True}, "do not divide as True says"),
            ("thirds", "split='thirds'.: give 'auto', or patterns"),
            ({"query_key_value": 3, "query*": 2}, "two patterns match query_key_value.weight"),
        ]
    ],
    read_plan: [(Each([({},), "all", ({"a": "diagonal"},), ({1: "row"},)]), TP_STYLES)],
    resolve_plan: [
        (
            (nn.Sequential(nn.Linear(2, 2)), "auto"),
            r"'auto'\) knows Llama and GPT-2 .* found none of them in Sequential",
        ),
        (
            (fsdp2_runs.model(), {"*.mlp.upp": "column"}),
            r"'\*.mlp.upp' matches no Linear, .* of Recorded. Layers that exist: model.t",
        ),
        *[
            ((fsdp2_runs.model(), plan), "'vocabulary' is for nn.Embedding, and the only style for it")
            for plan in ({"*.token_embedding": "column"}, {"*.head": "vocabulary"})
        ],
        *[
            (
                (nn.ModuleDict({"table": nn.Embedding(8, 4, **{name: value})}), {"table": "vocabulary"}),
                f"table has {name}=.* cannot be split as 'vocabulary'. Leave that out, or plan",
            )
            for name, value in (("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True))
        ],
    ],
    split_between: [
        ((fsdp2_runs.model(), {"model.blocks.0.mlp.down": "row"}, 3), "a dimension of 64, which 3 ranks do not divide"),
        ((HuggingFace("llama"), "auto", 4), "num_key_value_heads=2, which 4 ranks do not divide; each rank"),
        ((fsdp2_runs.model(), "auto", 4), r"attention has heads=2, which 4 ranks .* 'column_gather', .* 'row_split'"),
        ((HuggingFace("gpt2"), "auto", 4), "attn has num_heads=2, which 4 ranks do not divide"),
        (
            (fsdp2_runs.model(), {"model.blocks.0.mlp.up": "column_qkv"}, 2),
            "up is split as 'column_qkv', for .* but has 64 outputs, not a multiple of 3",
        ),
        (
            (nn.ModuleDict({"qkv": nn.Linear(4, 12)}), {"qkv": "column_qkv"}, 3),  # 4 queries, 4 keys and 4 values
            "qkv is split as 'column_qkv' along a dimension of 4, which 3 ranks do not",
        ),
    ],
    split_along_the_sequence: [
        ((fsdp2_runs.model(), plan), words)
        for plan, words in [
            (BLOCKS | CUT | WHOLE, r"attention_norm \(LayerNorm\) is in blocks .* Give a norm the style 'sequence'"),
            (
                {"*.attention_norm": "sequence"} | CUT,
                "attention_norm is 'sequence', and no list of blocks around it is",
            ),
            (
                BLOCKS | {"*blocks*_norm": "sequence"} | CUT,
                "query_key_value is 'column_qkv' in .* 'whole_sequence': it gath",
            ),
            (WHOLE | CUT, "attention is 'whole_sequence' and is in no blocks that are 'sequence'"),
        ]
    ],
    blocks_along_the_sequence: [
        (([], {}), "blocks is 'sequence' and is empty"),
        (([nn.Linear(2, 2)], {"blocks.0": "row_split"}), "'row_split' in blocks .* would get a part of the tokens"),
    ],
}


@refusals(PLUGINS)
def test_arguments_of_plugins(refusal: Refusal) -> None:
    refusal.check()


@refusals(CALLBACKS)
def test_arguments_of_callbacks(refusal: Refusal) -> None:
    refusal.check()


@refusals(STRATEGIES)
def test_arguments_of_strategies_and_optimizers(refusal: Refusal) -> None:
    refusal.check()
