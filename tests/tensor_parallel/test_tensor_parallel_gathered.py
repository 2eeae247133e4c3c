"""Attention that is not split by heads, tables of embeddings in parts, and stock clipping, against one process."""

from typing import Any

import huggingface_models as hf
import lightning.pytorch as pl
import pytest
import torch
from fsdp2_runs import assert_close_by_name, fsdp2, full_weights
from gloo import on_ranks, process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins import Precision
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from lightning_mp.ground.core.patches import Patches
from lightning_mp.training.gradients.clipping import clip_norm_, let_clip_over_meshes
from lightning_mp.training.tensor_parallel.known_models import Style
from lightning_mp.training.tensor_parallel.layers import SharedInput, split_layer
from lightning_mp.training.tensor_parallel.plan import Plan, check_divisible, resolve_plan

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

LLAMA: dict[str, Style] = {
    "*.q_proj": "column_gather",
    "*.k_proj": "column_gather",
    "*.v_proj": "column_gather",
    "*.o_proj": "row_split",
}
GPT2: dict[str, Style] = {"*.c_attn": "column_gather", "*.attn.c_proj": "row_split"}


def llama(kv_heads: int = 1) -> LlamaForCausalLM:
    return hf.llama(vocab_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=8)


def gpt2() -> GPT2LMHeadModel:
    return hf.gpt2(vocab_size=32, n_positions=8)


class Model(pl.LightningModule):
    def __init__(self, make: Any, *, freeze: str = "-") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: nn.Module = make()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(freeze not in name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def trained(make: Any, ranks: int, plan: Plan | None = None, freeze: str = "-", **arguments: Any) -> dict[str, Tensor]:
    module = Model(make, freeze=freeze).train()
    strategy = fsdp2(tensor_parallel_size=2, tensor_parallel_plan=plan) if ranks > 1 else "auto"
    trainer = quiet_trainer(devices=ranks, strategy=strategy, plugins=[Precision()], **arguments)
    rows = torch.randint(32, (3, 2, 8), generator=torch.Generator().manual_seed(3))
    trainer.fit(module, loader([[each] for each in rows]))
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
    return full_weights(module)


def test_fewer_key_value_heads_than_ranks_are_refused_with_a_plan_that_works() -> None:
    model = llama(kv_heads=1)
    with pytest.raises(ValueError, match=r"num_key_value_heads=1, which 2 ranks .* keys and values as 'column_gather'"):
        check_divisible(model, resolve_plan(model, "auto"), 2)
    check_divisible(model, resolve_plan(model, {**LLAMA, "*": "auto"}), 2)
    with pytest.raises(ValueError, match="num_key_value_heads=1"):
        check_divisible(model, resolve_plan(model, {"*.q_proj": "column_gather", "*": "auto"}), 2)


@pytest.mark.full
@pytest.mark.parametrize(("make", "gathered"), [(llama, LLAMA), (gpt2, GPT2)])
def test_attention_on_all_heads_equals_one_process(make: Any, gathered: dict[str, Style]) -> None:
    """In blocks split along the sequence, too, where gradients are sums over ranks until they are scattered."""
    plans: list[Plan] = [{**gathered, "*": "auto"}, {**gathered, "*": "auto_sequence"}]
    alone = trained(make, 1)
    for of_rank in run_ranks(lambda rank: [trained(make, 2, plan) for plan in plans], 2):
        for weights in of_rank:
            assert_close_by_name(weights, alone, rtol=0, atol=2e-6)


def test_gradients_on_two_meshes_are_clipped_by_one_norm() -> None:
    """Split, whole on all ranks, and one that has no gradient."""

    def run(rank: int) -> Any:
        with process_group():
            layers = [nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4)]
            before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
            split_layer(layers[0], "column", init_device_mesh("cpu", (2,)), shared=SharedInput())
            parameters = [parameter for layer in layers for parameter in layer.parameters()]
            for parameter in parameters[:-2]:
                parameter.grad = parameter.detach().clone()
            clip_norm_(torch.optim.SGD(parameters, lr=0.1), 0.5)
            ours = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters[:-2]]
            copies = [nn.Parameter(value) for value in before[:-2]]
            for copy in copies:
                copy.grad = copy.detach().clone()
            nn.utils.clip_grad_norm_(copies, 0.5)
            for gradient, copy in zip(ours, copies, strict=True):
                torch.testing.assert_close(gradient, copy.grad)

    torch.manual_seed(0)
    run_ranks(run, 2)


def test_a_plugin_that_clips_in_its_own_way_keeps_it() -> None:
    class Own(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None: ...

    plugin, own, patches = Precision(), Own(), Patches(quiet_trainer())
    for each in (plugin, own):
        let_clip_over_meshes(each, patches)
    assert plugin.clip_grad_by_norm.func is clip_norm_
    assert "clip_grad_by_norm" not in vars(own)
    patches.undo_all()
    assert "clip_grad_by_norm" not in vars(plugin)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_stock_clipping_equals_one_process(ranks: int) -> None:
    """Of a whole model, and with a part of it frozen."""

    def run(ranks: int) -> list[dict[str, Tensor]]:
        plan: Plan = "auto_sequence"
        return [
            trained(lambda: llama(kv_heads=2), ranks, plan, freeze, gradient_clip_val=0.1) for freeze in ("-", "mlp")
        ]

    alone = run(1)
    for of_rank in run_ranks(lambda rank: run(ranks), ranks):
        for weights, expected in zip(of_rank, alone, strict=True):
            assert_close_by_name(weights, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("padding", [None, 1, 6])
@on_ranks(run_ranks, 2)
def test_a_table_in_parts_gives_rows_and_gradients_of_the_whole(rank: int, padding: int | None) -> None:
    with process_group():
        whole, split = (nn.Embedding(8, 4, padding_idx=padding) for _ in range(2))
        split.load_state_dict(whole.state_dict())
        split_layer(split, "vocabulary", init_device_mesh("cpu", (2,)), shared=SharedInput())
        ids = torch.tensor([[0, 1, 1, 3], [4, 6, 7, 6]])
        factor = torch.arange(32.0).view(2, 4, 4)
        (whole(ids) * factor).sum().backward()
        (split(ids) * factor).sum().backward()
        assert torch.equal(split(ids), whole(ids))
        assert torch.equal(split.weight.grad.full_tensor(), whole.weight.grad)
        assert split.weight.to_local().shape == (4, 4)
        assert not torch.equal(F.embedding(ids % 4, split.weight.to_local()), whole(ids))
