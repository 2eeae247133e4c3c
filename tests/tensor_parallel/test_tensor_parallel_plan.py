"""FSDP2Strategy(tensor_parallel_size=...): layers split by a plan, alone and with FSDP2, against one process."""

from typing import Any

import pytest
import torch
from fsdp2_runs import assert_close_by_name, assert_same, assert_same_on_ranks, fp16, fsdp2, full_weights, model, train
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from huggingface_models import HuggingFace
from huggingface_models import gpt2 as huggingface_gpt2
from lightning.pytorch.plugins import Precision
from small_models import loader, quiet_trainer
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision
from lightning_mp.training.tensor_parallel.plan import check_divisible, resolve_plan

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

MLP_ONLY = {"*.mlp.up": "column", "*.mlp.down": "row"}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(gradient_clip_val=0.5)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, {}),
        pytest.param(2, {"tensor_parallel_plan": MLP_ONLY}, marks=pytest.mark.full),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(4, {"replicate_size": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tensor_parallel_size": 4, "tensor_parallel_plan": MLP_ONLY}, marks=pytest.mark.full),
    ],
    ids=["tensor", "mlp only", "2-D", "hybrid 2-D", "four"],
)
def test_it_equals_one_process(ranks: int, arguments: dict[str, Any], alone: dict[str, Any]) -> None:
    """D02, D20, D21: fused AdamW over two meshes, norm clipping, fp16; what is not split is the same on all ranks."""

    def run(rank: int) -> Any:
        strategy = fsdp2(**{"tensor_parallel_size": 2} | arguments)
        module = model()
        found = train(rank, ranks, strategy, module=module, gradient_clip_val=0.5)
        up, norm = module.model.blocks[0].mlp.up.weight, module.model.final_norm.weight
        return found | {"split": up.to_local().numel() / up.numel(), "norm dtype": norm.dtype}

    found = run_ranks(run, ranks)
    assert_same_on_ranks(found)
    assert_same(found[0], alone)
    copies = arguments.get("replicate_size", 1)
    assert found[0]["split"] == copies / ranks
    parts = arguments.get("tensor_parallel_size", 2)
    means = [sum(values) / len(values) for values in zip(*(rank["losses"] for rank in found[::parts]), strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-3)


@pytest.mark.full
def test_fp32_equals_one_process_to_the_rounding_of_sums() -> None:
    def run(rank: int) -> Any:
        return train(rank, 2, fsdp2(tensor_parallel_size=2), plugin=Precision())

    found = run_ranks(run, 2)
    assert_same_on_ranks(found)
    assert_same(found[0], train(plugin=Precision()), atol=2e-6)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),
        pytest.param(2, {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tensor_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=["FSDP2", "tensor", "2-D"],
)
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.full), "gpt2"])
def test_hugging_face_models_equal_one_process(kind: str, ranks: int, arguments: dict[str, Any]) -> None:
    """Tied weights, rotary tables and a Conv1D; all ranks see the same rows. GPT-2 with dropout: ranks
    that compute one model together draw the masks of the first of them, whatever their seeds."""

    def run(devices: int, seed: int = 5) -> Any:
        module = HuggingFace(kind)
        trainer = quiet_trainer(
            devices=devices,
            strategy=fsdp2(**arguments) if devices > 1 else "auto",
            plugins=[AutocastPrecision("bf16-mixed")],
            gradient_clip_val=0.5,
        )
        ids = torch.randint(32, (3, 2, 8), generator=torch.Generator().manual_seed(3))
        torch.manual_seed(seed)
        module.train()  # as transformers' from_pretrained leaves it in evaluation
        trainer.fit(module, loader([[rows] for rows in ids]))
        units = getattr(trainer.strategy, "unit_names", ())
        split = [name for name, p in module.named_parameters() if isinstance(p, DTensor) and p.device_mesh.ndim > 1]
        return full_weights(module), units, split

    alone, _, _ = run(1)
    parts = arguments.get("tensor_parallel_size", 1)
    for weights, units, split in run_ranks(lambda rank: run(ranks, seed=5 + rank % parts), ranks):
        assert len(units) == 2
        assert bool(split) is bool(arguments)
        assert_close_by_name(weights, alone, rtol=1e-3, atol=2e-3)


def test_auto_knows_what_it_splits() -> None:
    gpt = resolve_plan(model(), "auto")
    assert gpt["model.token_embedding"] == "vocabulary"
    assert gpt["model.head"] == "vocab_parallel_head"
    assert gpt["model.blocks.1.attention.query_key_value"] == "column_qkv"
    assert gpt["model.blocks.1.mlp.down"] == "row"
    assert len(gpt) == 10
    llama = resolve_plan(HuggingFace("llama"), "auto")
    assert {name.rpartition(".")[2]: style for name, style in llama.items()} == {
        "embed_tokens": "vocabulary",
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "o_proj": "row",
        "gate_proj": "column",
        "up_proj": "column",
        "down_proj": "row",
        "lm_head": "vocab_parallel_head",
    }
    assert len(resolve_plan(HuggingFace("gpt2"), "auto")) == 10


def test_the_first_rule_wins() -> None:
    assert resolve_plan(model(), {"*.0.mlp.up": "column_gather", "*.up": "column"}) == {
        "model.blocks.0.mlp.up": "column_gather",
        "model.blocks.1.mlp.up": "column",
    }


def test_a_vocabulary_that_ranks_do_not_divide_can_be_left_whole() -> None:
    """Tied weights: the embedding and the head go together."""
    gpt2 = huggingface_gpt2()
    with pytest.raises(ValueError, match=r"wte is split as 'vocabulary' along a dimension of 31, .* let it be 'whole'"):
        check_divisible(gpt2, resolve_plan(gpt2, "auto"), 2)
    styles = resolve_plan(gpt2, {"*.wte": "whole", "lm_head": "whole", "*": "auto"})
    check_divisible(gpt2, styles, 2)
    assert styles.keys() == resolve_plan(gpt2, "auto").keys() - {"transformer.wte", "lm_head"}


@on_ranks(run_ranks, 2)
def test_tied_weights_that_would_be_split_apart_are_refused(rank: int) -> None:
    strategy = fsdp2(tensor_parallel_size=2, tensor_parallel_plan={"*.token_embedding": "vocabulary"})
    with pytest.raises(ValueError, match=r"are one parameter \(tied weights\) and would be split differently"):
        train(rank, 2, strategy, plugin=fp16())


def test_norms_of_hugging_face_can_be_named_in_a_plan() -> None:
    plan: Any = {"*layernorm": "sequence", "*": "auto"}
    styles = resolve_plan(HuggingFace("llama").model, plan)
    assert styles["model.layers.1.post_attention_layernorm"] == "sequence"
