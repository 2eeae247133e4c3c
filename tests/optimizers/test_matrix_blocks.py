"""Fused matrices whose blocks Muon orthogonalises apart: to the bit what a module with one weight for each gets."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from gloo import run_group
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Muon

from lightning_mp import AutocastPrecision, JointOptimizer, matrices_and_rest
from lightning_mp.language_model.gpt import GPT, CausalSelfAttention, GPTConfig
from lightning_mp.training.checkpoints.fused_qkv import FusedOrder, fused_orders, hold_in_rank_order
from lightning_mp.training.optimizers.fused_layers import known_splits
from lightning_mp.training.optimizers.matrix_blocks import BLOCKS, blocks_of

WIDTH = 6
# How the outputs of the fused layer divide, and the rows of each block.
SPLITS: dict[str, tuple[Any, list[list[int]]]] = {
    "thirds": (3, [list(range(8)), list(range(8, 16)), list(range(16, 24))]),
    "grouped queries": ((16, 4, 4), [list(range(16)), list(range(16, 20)), list(range(20, 24))]),
    "by head": (
        (2, 1, 1),
        [sorted([*range(0, 24, 4), *range(1, 24, 4)]), list(range(2, 24, 4)), list(range(3, 24, 4))],
    ),
}


class Fused(nn.Module):
    """The fused layer, and one that is not split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query_key_value = nn.Linear(WIDTH, 24)
        self.output = nn.Linear(24, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.output(self.query_key_value(x).tanh()).tanh())


def optimizer_of(module: nn.Module, parts: Any, **settings: Any) -> JointOptimizer:
    matrices, rest = matrices_and_rest(module, matrices=["output.weight"], split={"query_key_value": parts})
    return JointOptimizer([Muon(matrices, lr=0.05, **settings), AdamW(rest, lr=1e-2)], module=module)


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Fused().named_parameters()}


def by_hand(rows: list[list[int]], **settings: Any) -> torch.Tensor:
    """The fused weight after three steps of torch's Muon over one parameter for each block."""
    weight = Fused().query_key_value.weight.detach()
    parts = [nn.Parameter(weight[own].clone()) for own in rows]
    optimizer = Muon(parts, lr=0.05, **settings)
    for step in range(3):
        for part, own in zip(parts, rows, strict=True):
            part.grad = gradients(step)["query_key_value.weight"][own].clone()
        optimizer.step()
    result = torch.empty_like(weight)
    for part, own in zip(parts, rows, strict=True):
        result[own] = part.detach()
    return result


@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}], ids=["", "settings"])
@pytest.mark.parametrize("name", SPLITS)
def test_equals_one_weight_for_each_block(name: str, settings: dict[str, Any]) -> None:
    parts, rows = SPLITS[name]
    module = Fused()
    optimizer = optimizer_of(module, parts, **settings)
    for step in range(3):
        for parameter, gradient in zip(module.parameters(), gradients(step).values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert torch.equal(module.query_key_value.weight, by_hand(rows, **settings))
    plain = Fused()
    stock = Muon([plain.output.weight], lr=0.05, **settings)
    for step in range(3):
        plain.output.weight.grad = gradients(step)["output.weight"]
        stock.step()
    assert torch.equal(module.output.weight, plain.output.weight), "a matrix that is not split is torch's"


def on_ranks(kind: str, parts: Any) -> torch.Tensor:
    """The fused weight after three steps, in the order of one process."""
    module, mesh = Fused(), init_device_mesh("cpu", (2,))
    layer = module.query_key_value
    if kind == "fsdp2":
        fully_shard(module, mesh=mesh)
    else:
        hold_in_rank_order(layer, 2, dim_of_weight=0)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    optimizer = optimizer_of(module, parts)
    order = fused_orders(module).get("query_key_value.weight", FusedOrder(1, 0))
    for step in range(3):
        for (name, parameter), gradient in zip(module.named_parameters(), gradients(step).values(), strict=True):
            value = order.by_rank(gradient) if name == "query_key_value.weight" else gradient
            shards = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(value, mesh, parameter.placements) if shards else value
        optimizer.step()
    assert isinstance(layer.weight, DTensor)
    return order.by_part(layer.weight.full_tensor().detach())


@pytest.mark.parametrize("kind", ["fsdp2", "tensor parallel"])
def test_equals_one_weight_for_each_block_on_ranks(kind: str) -> None:
    """Blocks lie across shards, and tensor parallelism holds thirds in another order."""
    names = ["thirds"] if kind == "tensor parallel" else list(SPLITS)

    for weights in run_group(lambda rank: {name: on_ranks(kind, SPLITS[name][0]) for name in names}, 2):
        for name, weight in weights.items():
            assert torch.equal(weight, by_hand(SPLITS[name][1])), (kind, name)


def test_layers_whose_weight_is_inputs_by_outputs_divide_along_the_second() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    module = nn.Sequential(Conv1D(24, WIDTH), nn.Linear(24, 2))
    fused = module[0].weight
    parts = [nn.Parameter(fused.detach()[:, own].clone()) for own in (slice(0, 8), slice(8, 16), slice(16, 24))]
    matrices, rest = matrices_and_rest(module, split={"0": 3})
    optimizers = JointOptimizer([Muon(matrices), SGD(rest)]), Muon(parts)
    fused.grad = torch.randn(fused.shape)
    for part, gradient in zip(parts, fused.grad.chunk(3, 1), strict=True):
        part.grad = gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(fused, torch.cat([part.detach() for part in parts], 1))


def test_a_checkpoint_does_not_change_how_the_module_divides() -> None:
    """On other ranks rows lie in another order; and a run may begin to split."""
    split, whole = optimizer_of(Fused(), 3), optimizer_of(Fused(), 3)
    for group in whole.param_groups:
        group.pop(BLOCKS, None)
    kept = [group.get(BLOCKS) for group in split.param_groups]
    split.load_state_dict(whole.state_dict())
    assert [group.get(BLOCKS) for group in split.param_groups] == kept
    assert any(kept)


KNOWN = (
    *("GPT-2", "GPT-2, cross-attention", "GPT-NeoX", "BLOOM", "Phi-3", "Phi-3, MLP"),
    *("the demo's", "nn.MultiheadAttention", "nn.TransformerEncoderLayer"),
)


def known_attention() -> dict[str, nn.Module]:
    """Attention of each known class, whose weight the table names."""
    from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, Phi3Config
    from transformers.models.bloom.modeling_bloom import BloomAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
    from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP

    torch.manual_seed(0)
    phi3 = Phi3Config(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    return {
        "GPT-2": GPT2Attention(GPT2Config(n_embd=16, n_head=4)),
        "GPT-2, cross-attention": GPT2Attention(GPT2Config(n_embd=16, n_head=4), is_cross_attention=True),
        "GPT-NeoX": GPTNeoXAttention(GPTNeoXConfig(hidden_size=16, num_attention_heads=4), layer_idx=0),
        "BLOOM": BloomAttention(BloomConfig(hidden_size=16, n_head=4), layer_idx=0),
        "Phi-3": Phi3Attention(phi3, layer_idx=0),
        "Phi-3, MLP": Phi3MLP(phi3),
        "the demo's": CausalSelfAttention(GPTConfig(layers=1, heads=4, width=16)),
        "nn.MultiheadAttention": nn.MultiheadAttention(16, 4, batch_first=True),
        "nn.TransformerEncoderLayer": nn.TransformerEncoderLayer(16, 4, batch_first=True),
    }


def called(name: str, attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What comes out of it, in training mode as in evaluation."""
    if name == "GPT-NeoX":
        tables = torch.ones(1, x.shape[1], 4), torch.zeros(1, x.shape[1], 4)
        return attention.eval()(x, None, position_embeddings=tables)[0]
    if name == "Phi-3":
        tables = torch.ones(1, x.shape[1], 4), torch.zeros(1, x.shape[1], 4)
        return attention.eval()(x, tables, None)[0]
    if name == "BLOOM":
        alibi = torch.zeros(x.shape[0] * 4, 1, x.shape[1])
        mask = torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1])
        return attention.eval()(x, torch.zeros_like(x), alibi=alibi, attention_mask=mask)[0]
    if name == "GPT-2, cross-attention":
        return attention.eval()(x, encoder_hidden_states=x)[0]
    result = attention.eval()(x, x, x) if name == "nn.MultiheadAttention" else attention.eval()(x)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", KNOWN)
def test_the_weights_of_known_classes_are_divided(name: str) -> None:
    """The last block are values: without them nothing of the input gets through. The first are queries or keys."""
    module = known_attention()[name]
    [(weight, parts)] = known_splits(module).items()
    groups, _ = matrices_and_rest(module, matrices=[weight], split="auto")
    [(dim, blocks)] = [group[BLOCKS] for group in groups if BLOCKS in group]
    assert len(blocks) == (parts if isinstance(parts, int) else len(parts))
    x, y = torch.randn(2, 2, 5, 16)
    if name == "nn.TransformerEncoderLayer":
        return  # its attention is the one above
    for parameter in module.parameters():  # biases would hide what weights do
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
    differs = []
    for ranges in blocks:
        kept = module.get_parameter(weight).detach().clone()
        with torch.no_grad():
            for start, end in ranges:
                module.get_parameter(weight).narrow(dim, start, end - start).zero_()
            differs.append(not torch.allclose(called(name, module, x), called(name, module, y)))
            module.get_parameter(weight).copy_(kept)
    assert differs == [name != "Phi-3, MLP"] * (len(blocks) - 1) + [False]
    assert not torch.allclose(called(name, module, x), called(name, module, y))


def test_weights_that_sound_fused_are_named_and_left_whole(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(OrderedDict(Wqkv=nn.Linear(4, 12), output=nn.Linear(12, 4), head=nn.Linear(4, 2)))
    with caplog.at_level("INFO"):
        groups, _ = matrices_and_rest(module, split="auto")
    assert all(BLOCKS not in group for group in groups)
    [message] = [record.message for record in caplog.records if "matrices_and_rest" in record.message]
    assert "how Wqkv.weight divides is not known of the class" in message
    assert "split={'*Wqkv*': 3}" in message
    assert [BLOCKS in group for group in matrices_and_rest(module, split={"*Wqkv*": 3}).matrices] == [True]
    caplog.clear()
    matrices_and_rest(GPT(GPTConfig(layers=1, heads=4, width=16)), split="auto")
    assert not caplog.records


class Alone(Regression):
    def configure_optimizers(self) -> Any:
        first = next(p for p in self.parameters() if p.ndim == 2)
        return Muon([{"params": [first], BLOCKS: blocks_of(first.shape[0], 2, 0)}])


def test_optimizers_that_know_no_blocks_are_refused() -> None:
    trainer = quiet_trainer(plugins=[AutocastPrecision("bf16-mixed")], max_steps=1)
    with pytest.raises(MisconfigurationException, match="Muon: matrices_and_rest"):
        trainer.fit(Alone(), loader(regression_batches(1)))
