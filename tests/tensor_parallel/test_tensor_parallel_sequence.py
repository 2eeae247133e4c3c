"""Style "sequence": norms, dropout and residuals on parts of the tokens, between layers that are split."""

import warnings
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from fsdp2_runs import assert_close_by_name, assert_same, assert_same_on_ranks, fp16, fsdp2, full_weights, model, train
from gloo import COMPILER, on_ranks, run_group
from gloo import run_same_ranks as run_ranks
from huggingface_models import HuggingFace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from small_models import at, fit, loader, plant_inf, quiet_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from wire_counter import CountsTheStep

from lightning_mp import AccumulationScheduler, ActivationCheckpointing
from lightning_mp.training.tensor_parallel import dtensor_edges
from lightning_mp.training.tensor_parallel.plan import resolve_plan
from lightning_mp.training.tensor_parallel.sequence_parallel import (
    check_sequence_styles,
    split_sequence_of_blocks,
    take_whole_sequence,
    work_on_parts,
)

SEQUENCE: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto_sequence"}
NORM, QKV = "model.blocks.0.mlp_norm.weight", "model.blocks.0.attention.query_key_value.weight"


class Tokens(Callback):
    """How many tokens a norm of a block, a layer that is split and the last norm see, in training and in evaluation."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        gpt = pl_module.model
        layers = {"norm": gpt.blocks[1].mlp_norm, "row": gpt.blocks[0].mlp.down, "last norm": gpt.final_norm}
        for name, layer in layers.items():
            layer.register_forward_hook(
                lambda layer, _, output, n=name: self.seen.setdefault(
                    f"{n}, {'training' if layer.training else 'evaluation'}", set()
                ).add(output.shape[1])
            )


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "plugin", "arguments"),
    [
        (2, Precision, {}),
        (2, fp16, {"gradient_clip_val": 0.5}),
        (4, fp16, {"gradient_clip_val": 0.5}),
        (4, Precision, {}),
    ],
    ids=["fp32", "16-mixed", "2-D, 16-mixed", "2-D, fp32"],
)
def test_it_equals_one_process(ranks: int, plugin: Any, arguments: dict[str, Any]) -> None:
    """Norms' gradients are whole before they are unscaled, counted in the norm and clipped."""

    def run(rank: int) -> Any:
        module, tokens = model(), Tokens()
        found = train(rank, ranks, fsdp2(**SEQUENCE), module=module, plugin=plugin(), callbacks=[tokens], **arguments)
        norm = module.get_parameter(NORM)
        assert isinstance(norm, DTensor)
        return found | {"seen": tokens.seen, "dtypes": (norm.dtype, norm.grad is None or norm.grad.dtype)}

    alone = train(plugin=plugin(), **arguments)
    found = run_ranks(run, ranks)
    assert_same_on_ranks(found)
    assert_same(found[0], alone, atol=2e-6 if plugin is Precision else 3e-4)
    assert found[0]["dtypes"][0] == torch.float32
    assert found[0]["seen"] == {
        "norm, training": {4},  # of 8
        "row, training": {4},
        "last norm, training": {8},
        "norm, evaluation": {8},
        "row, evaluation": {8},
        "last norm, evaluation": {8},
    }


@pytest.mark.full
def test_hugging_face_models_equal_one_process() -> None:
    cases = list(product(("llama", "gpt2"), (fp16, Precision)))

    def run(kind: str, plugin: Any, devices: int) -> Any:
        module = HuggingFace(kind, dropout=0.0)
        trainer = quiet_trainer(
            devices=devices,
            strategy=fsdp2(**SEQUENCE) if devices > 1 else "auto",
            plugins=[plugin()],
            gradient_clip_val=0.5 if plugin is fp16 else None,
        )
        ids = torch.randint(32, (3, 2, 8), generator=torch.Generator().manual_seed(3))
        module.train()
        trainer.fit(module, loader([[rows] for rows in ids]))
        return full_weights(module)

    found = run_ranks(lambda rank: [run(*case, 4) for case in cases], 4, timeout_seconds=110)
    for (kind, plugin), of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        alone = run(kind, plugin, 1)
        for weights in of_ranks:
            assert_close_by_name(weights, alone, rtol=1e-3, atol=3e-4 if plugin is fp16 else 2e-6)


@pytest.mark.full
def test_windows_and_recomputed_blocks_equal_one_process() -> None:
    """A gradient that was not finished in the first micro-batch is not lost in the second."""

    def run(rank: int, ranks: int) -> Any:
        callbacks = [AccumulationScheduler({0: 2}), ActivationCheckpointing("Block")]
        return train(rank, ranks, fsdp2(**SEQUENCE) if ranks > 1 else "auto", steps=3, callbacks=callbacks)

    found = run_ranks(lambda rank: run(rank, 2), 2)
    assert_same_on_ranks(found)
    assert_same(found[0], run(0, 1))


@pytest.mark.full
def test_an_older_torch_gives_the_same() -> None:
    """One whose from_local knows no placements of gradients."""

    def run(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dtensor_edges, "_TAKES_GRAD_PLACEMENTS", False)
            return train(rank, 2, fsdp2(**SEQUENCE), plugin=Precision())

    found = run_ranks(run, 2)
    assert_same_on_ranks(found)
    assert_same(found[0], train(plugin=Precision()), atol=2e-6)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
def test_compiled_blocks_equal_one_process() -> None:
    def run(rank: int) -> Any:
        module = model()
        for block in module.model.blocks:
            block.compile(backend="aot_eager")
        return train(rank, 2, fsdp2(**SEQUENCE), module=module, steps=2, plugin=Precision(), num_sanity_val_steps=0)

    found = run_ranks(run, 2, imports=COMPILER)
    assert_same_on_ranks(found)
    assert_same(found[0], train(steps=2, plugin=Precision()), atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("plan", "weight"), [("auto_sequence", NORM), ("auto", QKV)], ids=["a norm", "its heads"])
def test_an_overflow_on_one_rank_skips_on_all(plan: Any, weight: str, ranks: int) -> None:
    def run(rank: int) -> Any:
        strategy = fsdp2(tensor_parallel_size=2, tensor_parallel_plan=plan)
        return train(rank, ranks, strategy, callbacks=[at(plant_inf(weight), "on_after_backward", rank=-1, step=1)])

    found = run_ranks(run, ranks)
    assert_same_on_ranks(found)
    assert (found[0]["skipped"], found[0]["scale"], found[0]["steps"]) == (1, 512.0, 4)
    assert all(torch.isfinite(value).all() for value in found[0]["weights"].values())


@pytest.mark.parametrize("kind", ["demo", "llama"])
@pytest.mark.full
def test_an_all_reduce_becomes_a_reduce_scatter_and_an_all_gather(kind: str) -> None:
    """One step, forward and backward: the same bytes, in halves. Llama's queries, keys and values share one input."""
    activations = (4 if kind == "demo" else 2) * 8 * 16 * 4  # rows, tokens, width, bytes

    def run(rank: int, plan: str) -> Any:
        count = CountsTheStep()
        strategy = fsdp2(tensor_parallel_size=2, tensor_parallel_plan=plan)
        if kind == "demo":
            train(rank, 2, strategy, steps=1, plugin=Precision(), callbacks=[count], limit_val_batches=0)
        else:
            module = HuggingFace("llama").train()
            rows = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))
            fit(module, [[rows]], count, devices=2, strategy=strategy, max_steps=1)
        return Counter(c.name for c in count.counter.seen if c.payload_bytes == activations)

    # The embedding and the head's input; then two blocks with two modules each, forward and backward.
    assert run_ranks(lambda rank: run(rank, "auto"), 2)[0] == {"all_reduce": 2 + 2 * 2 * 2}
    found = run_ranks(lambda rank: run(rank, "auto_sequence"), 2)[0]
    # Where parts begin and end, one gather more, in backward and in forward.
    assert found == {"all_reduce": 2, "all_gather": 2 * 2 * 2 + 2, "reduce_scatter": 2 * 2 * 2}


@pytest.mark.full
def test_dropout_differs_between_parts_of_the_sequence_and_nowhere_else() -> None:
    def run(rank: int) -> Any:
        module = HuggingFace("gpt2", dropout=0.5)
        gpt = module.model.transformer
        gpt.drop.p = 0.5
        masks: dict[str, Tensor] = {}
        for name, layer in (("parts", gpt.h[0].mlp.dropout), ("whole", gpt.drop)):
            layer.register_forward_hook(lambda _, args, output, n=name: masks.update({n: output.detach() == 0}))
        trainer = quiet_trainer(devices=2, strategy=fsdp2(**SEQUENCE), max_steps=1)
        torch.manual_seed(5)
        module.train()
        trainer.fit(module, loader([[torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))]]))
        return masks, torch.rand(3), full_weights(module)

    (mine, numbers, weights), (theirs, other_numbers, other_weights) = run_ranks(run, 2)
    assert torch.equal(mine["whole"], theirs["whole"])
    assert mine["parts"].shape[1] == 4
    assert 0.3 < (mine["parts"] != theirs["parts"]).float().mean() < 0.7  # half of the elements if independent
    assert torch.equal(numbers, other_numbers)
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


@pytest.mark.full
def test_recomputed_dropout_is_the_same_dropout() -> None:
    """With an activation checkpoint the masks are drawn again, and the weights are those without it."""

    def run(rank: int, recompute: bool) -> Any:
        module = HuggingFace("gpt2", dropout=0.5)
        callbacks = [ActivationCheckpointing("GPT2Block")] if recompute else []
        trainer = quiet_trainer(devices=2, strategy=fsdp2(**SEQUENCE), callbacks=callbacks, max_steps=1)
        torch.manual_seed(5)
        module.train()
        trainer.fit(module, loader([[torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))]]))
        return full_weights(module)

    kept, _ = run_ranks(lambda rank: run(rank, False), 2)
    for weights in run_ranks(lambda rank: run(rank, True), 2):
        assert_close_by_name(weights, kept, atol=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@on_ranks(run_ranks, 2)
def test_sequences_that_ranks_do_not_divide_are_refused_in_training_only(rank: int) -> None:
    module = HuggingFace("gpt2")
    trainer = quiet_trainer(devices=2, strategy=fsdp2(**SEQUENCE), max_steps=1)
    module.train()
    with pytest.raises(ValueError, match=r"sequences of 7 tokens, which 2 ranks do not divide.*pad_to_multiple_of"):
        trainer.fit(module, loader([[torch.zeros(2, 7, dtype=torch.int64)]]))
    module.eval()
    with torch.no_grad():
        assert module.model(torch.zeros(2, 7, dtype=torch.int64)).logits.shape == (2, 7, 32)
        tokens = module.model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=4, do_sample=False)
        assert tokens.shape == (1, 7)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training")
@on_ranks(run_ranks, 2)
def test_a_model_in_evaluation_mode_is_trained_whole_with_a_warning(rank: int) -> None:
    module = HuggingFace("gpt2").eval()
    trainer = quiet_trainer(devices=2, strategy=fsdp2(**SEQUENCE), max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader([[torch.zeros(2, 7, dtype=torch.int64)]]))
    said = [str(warning.message) for warning in caught if "evaluation mode, so it is not" in str(warning.message)]
    assert len(said) == (rank == 0)
    assert not said or "Call model.train() before the fit" in said[0]


BLOCKS = {"*.blocks": "sequence"}
WHOLE = {"*.attention": "whole_sequence", "*.mlp": "whole_sequence"}
CUT = {"*.query_key_value": "column_qkv", "*.output": "row", "*.up": "column", "*.down": "row"}


def test_the_automatic_plan_can_be_written_out() -> None:
    gpt = model()
    written = {**BLOCKS, "*blocks*_norm": "sequence", **WHOLE, **CUT, "*.head": "vocab_parallel_head", "*": "auto"}
    assert resolve_plan(gpt, written) == resolve_plan(gpt, "auto_sequence")
    check_sequence_styles(gpt, resolve_plan(gpt, written))
    with pytest.raises(ValueError, match="'blocks' matches no norm, Dropout or ModuleList of Recorded"):
        resolve_plan(gpt, {"blocks": "sequence"})
    with pytest.raises(ValueError, match=r"'\*.ups' matches no layer that 'auto' knows of Recorded"):
        resolve_plan(gpt, {"*.ups": "auto"})
    nested = nn.ModuleList([nn.ModuleList([nn.LayerNorm(2)])])
    with pytest.raises(ValueError, match="0 is 'sequence' and is in another such list"):
        check_sequence_styles(nn.ModuleDict({"a": nested}), {"a": "sequence", "a.0": "sequence", "a.0.0": "sequence"})


class GivesATuple(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        return hidden * 2, hidden.shape[1]


def test_blocks_whose_sequence_is_split_may_give_tuples() -> None:
    value = torch.arange(8.0).view(1, 4, 2)

    def given(rank: int) -> Any:
        blocks = nn.ModuleList([GivesATuple(), GivesATuple()])
        split_sequence_of_blocks(blocks, init_device_mesh("cpu", (2,)))
        hidden, first = blocks[0](value)
        hidden, last = blocks[1](hidden)
        return hidden.tolist(), first, last

    assert run_group(given, 2) == [((4 * value).tolist(), 2, 2)] * 2


def test_a_norm_that_sees_all_tokens_has_their_gradient_once() -> None:
    """A model that is trained in evaluation mode is not split along the sequence."""
    value = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    alone = nn.LayerNorm(6)
    alone(value).square().sum().backward()

    def gradient(rank: int) -> Tensor:
        norm = nn.LayerNorm(6)
        work_on_parts(norm, init_device_mesh("cpu", (2,)), lambda: False)
        norm(value).square().sum().backward()
        return norm.weight.grad.full_tensor()

    for found in run_group(gradient, 2):
        torch.testing.assert_close(found, alone.weight.grad)


class TakesNames(nn.Module):
    def forward(self, *, causal: bool, hidden: Tensor) -> Tensor:
        return hidden * 1


def test_what_is_gathered_is_the_first_tensor_also_after_other_arguments() -> None:
    def shape(rank: int) -> Any:
        module = TakesNames()
        take_whole_sequence(module, init_device_mesh("cpu", (2,)), lambda: True)
        return tuple(module(causal=True, hidden=torch.ones(1, 2, 3)).shape)

    assert run_group(shape, 2) == [(1, 4, 3)] * 2


@on_ranks(run_group, 2)
def test_activations_without_samples_are_refused(rank: int) -> None:
    blocks = nn.ModuleList([nn.Linear(4, 4)])
    split_sequence_of_blocks(blocks, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"must get activations \[batch, tokens, width\] .* shape \(2, 4\)"):
        blocks[0](torch.ones(2, 4))
