"""Style "vocab_parallel_head": logits split by vocabulary, the loss of parts, and the whole for everybody else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_runs import assert_same, assert_same_on_ranks, fp16, fsdp2, model, train
from gloo import on_ranks, process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from wire_counter import CountsTheStep, PartsCounter

from lightning_mp import AutocastPrecision
from lightning_mp.training.tensor_parallel.vocab_parallel_logits import VocabParallelLogits, split_logits
from lightning_mp.training.tensor_parallel.vocab_parallel_ops import VocabParallelSplit
from lightning_mp.training.tokens.loss_items import read_items

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

BATCH, TOKENS, VOCABULARY = 2, 6, 8
RANDOM = torch.Generator().manual_seed(0)
WHOLE = torch.randn(BATCH, TOKENS, VOCABULARY, generator=RANDOM, dtype=torch.float64)
LABELS = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=RANDOM)
SOME = LABELS.masked_fill(torch.rand(BATCH, TOKENS, generator=RANDOM) < 0.3, -100)
WEIGHT = torch.rand(VOCABULARY, generator=RANDOM, dtype=torch.float64)


def flat(logits: Tensor, labels: Tensor = LABELS, **arguments: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **arguments)


def in_place(logits: Tensor) -> Tensor:
    logits = logits * 1
    logits /= 2
    logits[..., 3] = -1.0
    logits[:, 0] += 1
    logits.masked_fill_(logits > 1, 0.5)
    return flat(logits)


def under_autocast(logits: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=logits.dtype):
        return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1)


IN_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"{reduction}, smoothing {smoothing}{', weights' if weight is not None else ''}": (
            lambda logits, r=reduction, s=smoothing, w=weight: flat(
                logits, SOME, reduction=r, label_smoothing=s, weight=w
            )
        )
        for reduction in ("mean", "sum", "none")
        for smoothing in (0.0, 0.1)
        for weight in (None, WEIGHT)
    },
    "module": lambda logits: torch.nn.CrossEntropyLoss(ignore_index=3)(logits.flatten(0, 1), LABELS.flatten()),
    "classes second": lambda logits: F.cross_entropy(logits.transpose(1, 2), LABELS, reduction="sum"),
    "permuted": lambda logits: F.cross_entropy(logits.permute(0, 2, 1), SOME),
    "shifted": lambda logits: flat(logits[..., :-1, :].contiguous(), LABELS[:, 1:].contiguous()),
    "last token": lambda logits: F.cross_entropy(logits[:, -1], LABELS[:, 0]),
    "one row": lambda logits: F.cross_entropy(logits[0, 0], LABELS[0, 0]),
    "rows by mask": lambda logits: F.cross_entropy(logits[SOME >= 0], SOME[SOME >= 0]),
    "temperature": lambda logits: flat(logits / 2.0),
    "soft cap": lambda logits: flat(torch.tanh(logits / 3) * 3),
    "a bias": lambda logits: flat(logits + WEIGHT),
    "unsqueezed": lambda logits: flat(logits.unsqueeze(1)[:, 0]),
    "twice": lambda logits: flat(logits) + F.cross_entropy(logits[:, 0], LABELS[:, 1]),
}
WITH_THE_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda logits: F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), LABELS.flatten()),
    "z-loss": lambda logits: flat(logits) + logits.logsumexp(-1).square().mean(),
    "probabilities": lambda logits: F.cross_entropy(logits.flatten(0, 1), WEIGHT.softmax(0).expand(12, 8)),
    "centred": lambda logits: flat(logits - logits.mean(-1, keepdim=True)),
    "half of the vocabulary": lambda logits: F.cross_entropy(logits[..., :5].flatten(0, 1), LABELS.flatten() % 5),
    "in place": in_place,
    "old arguments": lambda logits: flat(logits, size_average=False, reduce=True),
}


def check(
    name: str, loss_of: Callable[[Tensor], Tensor], split: VocabParallelSplit, dtype: torch.dtype
) -> PartsCounter:
    whole = WHOLE.to(dtype, copy=True).requires_grad_()
    part = split.own(WHOLE, 2).to(dtype).clone().requires_grad_()
    expected = loss_of(whole * 1)
    with PartsCounter() as counter:
        loss = loss_of(split_logits(part * 1, split))
        loss.sum().backward()
    expected.sum().backward()
    assert type(loss) is Tensor, name
    tolerance = {} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(loss.detach(), expected.detach(), msg=lambda text: f"{name}: {text}", **tolerance)
    gradient = split.own(whole.grad, 2)
    torch.testing.assert_close(part.grad, gradient, msg=lambda text: f"{name}, gradient: {text}", **tolerance)
    return counter


def test_it_counts_the_targets_that_torchs_counts() -> None:
    """Otherwise a run resumed with another number of parts could not weight its micro-batches. 16 bits would round."""
    rows = 301

    def run(rank: int) -> None:
        whole = torch.zeros(rows, VOCABULARY, dtype=torch.bfloat16)
        labels = torch.arange(rows) % VOCABULARY
        labels[:2] = -100
        with process_group():
            split = VocabParallelSplit(dist.group.WORLD)
            part = split.own(whole, 1).clone().requires_grad_()
            for weight in (None, WEIGHT.float()):
                of_parts = F.cross_entropy(split_logits(part * 1, split), labels, weight)
                of_whole = F.cross_entropy(whole.float().requires_grad_(), labels, weight)
                for loss, expected in ((of_parts, of_whole), (of_parts / 2 + 1, of_whole / 2 + 1)):
                    (ours,), (theirs,) = read_items(loss).means, read_items(expected).means
                    assert (ours.kind, ours.factor) == (theirs.kind, theirs.factor)
                    assert ours.total == pytest.approx(theirs.total, rel=1e-6)

    run_ranks(run, 2)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_is_torchs_cross_entropy_and_nothing_is_gathered(ranks: int) -> None:
    """In float64, to its rounding; what needs the whole is right, too, at the price of gathering."""

    def run(rank: int) -> None:
        with process_group():
            split = VocabParallelSplit(dist.group.WORLD)
            for name, loss_of in IN_PARTS.items():
                seen = check(name, loss_of, split, torch.float64).names()
                assert seen == ["all_reduce"] * (4 if name == "twice" else 2), name
            for name, loss_of in WITH_THE_WHOLE.items():
                assert "all_gather" in check(name, loss_of, split, torch.float64).names(), name
            for dtype in (torch.float16, torch.bfloat16):
                for loss_of in (under_autocast, flat, lambda logits: flat(logits.float())):
                    check(f"{dtype}", loss_of, split, dtype)

    run_ranks(run, ranks)


def test_twelve_bytes_per_row_go_over_the_wire() -> None:
    """fp32: the maximum; then the sum and the logit of the target. A gather would take 4 per row and column."""

    def run(rank: int) -> list[int]:
        with process_group():
            counter = check(
                "", lambda logits: flat(logits.float()), VocabParallelSplit(dist.group.WORLD), torch.float32
            )
            return [collective.payload_bytes for collective in counter.seen]

    rows = BATCH * TOKENS
    assert run_ranks(run, 2) == [[4 * rows, 8 * rows]] * 2


def test_the_loss_is_fp32_under_autocast_and_of_the_logits_dtype_without() -> None:
    def run(rank: int) -> Any:
        with process_group():
            split = VocabParallelSplit(dist.group.WORLD)
            logits = split_logits(split.own(WHOLE, 2).to(torch.float16).clone().requires_grad_() * 100, split)
            exact = F.cross_entropy(100 * WHOLE.to(torch.float16).double().flatten(0, 1), LABELS.flatten()).item()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = flat(logits)
            return loss.dtype, flat(logits).dtype, loss.item() / exact - 1

    for under, without, error in run_ranks(run, 2):
        assert (under, without) == (torch.float32, torch.float16)
        assert abs(error) < 1e-3  # of the logits, which were rounded once more by the product


@on_ranks(run_ranks, 2)
def test_everybody_else_sees_the_whole(rank: int) -> None:
    with process_group():
        split = VocabParallelSplit(dist.group.WORLD)
        part = split.own(WHOLE, 2).clone().requires_grad_()
        logits = split_logits(part * 1, split)
        gradients: list[Tensor] = []
        logits.register_hook(lambda gradient: gradients.append((gradient != 0).any(-1)))
        assert isinstance(logits, VocabParallelLogits)
        assert (logits.shape, logits.dtype, logits.is_leaf) == (WHOLE.shape, WHOLE.dtype, False)
        assert torch.equal(logits.argmax(-1), WHOLE.argmax(-1))
        assert torch.equal(logits.topk(3).values, WHOLE.topk(3).values)
        assert type(logits.detach()) is Tensor
        assert logits.detach().equal(WHOLE)
        assert logits.tolist() == WHOLE.tolist()
        assert copy.deepcopy(logits.detach()).equal(WHOLE)
        assert logits.to("cpu", torch.float32).float().detach().equal(WHOLE.float())
        assert f"part {rank} of 2, size=(2, 6, 8)" in repr(logits)
        flat(logits, SOME).backward()
        assert torch.equal(gradients[0], SOME >= 0)
        with torch.no_grad():
            assert type(split_logits(part, split)) is Tensor
            assert split_logits(part, split).equal(WHOLE)


@pytest.mark.parametrize(
    ("labels", "error"), [(torch.tensor([3, VOCABULARY]), IndexError), (torch.tensor([-1, 0]), IndexError)]
)
@on_ranks(run_ranks, 2)
def test_a_label_outside_of_the_vocabulary_is_refused(rank: int, labels: Tensor, error: type[Exception]) -> None:
    """Also by the rank that would not have it."""
    with process_group():
        split = VocabParallelSplit(dist.group.WORLD)
        logits = split_logits(split.own(WHOLE, 2)[0, :2].clone().requires_grad_(), split)
        with pytest.raises(error, match="out of range"):
            F.cross_entropy(logits, labels)
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(logits, labels[:1])


@pytest.mark.parametrize("planted", [torch.inf, torch.nan])
def test_an_overflow_in_the_columns_of_one_rank_is_in_the_loss_of_all(planted: float) -> None:
    def run(rank: int) -> Any:
        with process_group():
            split = VocabParallelSplit(dist.group.WORLD)
            part = split.own(WHOLE, 2).clone()
            part[0, 0, 0] = planted if rank == 1 else 0.0
            part.requires_grad_()
            loss = flat(split_logits(part * 1, split))
            loss.backward()
            return loss.isfinite().item(), part.grad.isfinite().all().item()

    assert run_ranks(run, 2) == [(False, False)] * 2


# -- in a run ----------------------------------------------------------------------------------------------------------


class LooksAtLogits(Callback):
    """What ordinary modules do with logits besides their loss."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.training: list[Tensor] = []
        self.evaluation: list[Tensor] = []
        pl_module.model.register_forward_hook(lambda gpt, _, logits: self.look(gpt, logits))

    def look(self, gpt: Any, logits: Tensor) -> None:
        (self.training if gpt.training else self.evaluation).append(logits.detach().float())
        if not gpt.training and dist.is_initialized() and dist.get_rank() == 0:
            assert type(logits) is Tensor
            logits.argmax(-1)  # one rank alone: in evaluation there is nothing to gather


@pytest.mark.full
@pytest.mark.parametrize("plugin", [fp16, lambda: AutocastPrecision("bf16-mixed")], ids=["16-mixed", "bf16-mixed"])
def test_logits_of_a_run_are_those_of_one_process(plugin: Any) -> None:
    def run(rank: int, ranks: int) -> Any:
        look = LooksAtLogits()
        strategy = fsdp2(tensor_parallel_size=2) if ranks > 1 else "auto"
        found = train(rank, ranks, strategy, steps=2, plugin=plugin(), callbacks=[look])
        return found, torch.stack(look.training[:2]), torch.stack(look.evaluation)

    alone, training, evaluation = run(0, 1)
    ranks = run_ranks(lambda rank: run(rank, 2), 2)
    assert_same_on_ranks([found for found, *_ in ranks])
    for found, *logits in ranks:
        assert_same(found, alone, atol=2e-3)
        torch.testing.assert_close(logits, (training, evaluation), rtol=0, atol=2e-2)


@pytest.mark.full
def test_a_step_gathers_no_logits() -> None:
    """16-mixed, 2 ranks: of the head there is only the loss's own exchange; with "column_gather" the logits go, too."""

    def run(rank: int, plan: Any) -> Any:
        count = CountsTheStep()
        strategy = fsdp2(tensor_parallel_size=2, tensor_parallel_plan=plan)
        found = train(rank, 2, strategy, steps=1, plugin=fp16(), callbacks=[count])
        return found, count.counter.count()

    (parts, in_parts), _ = run_ranks(lambda rank: run(rank, "auto"), 2)
    (whole, gathered), _ = run_ranks(lambda rank: run(rank, {"*.head": "column_gather", "*": "auto"}), 2)
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    rows, vocabulary = 4 * 8, 32
    more, less = gathered - in_parts, in_parts - gathered
    assert {(c.name, c.ranks, c.payload_bytes): n for c, n in more.items()} == {
        ("all_gather", 2, 2 * rows * vocabulary): 1
    }
    assert {(c.name, c.ranks, c.payload_bytes): n for c, n in less.items()} == {
        ("all_reduce", 2, 4 * rows): 1,
        ("all_reduce", 2, 8 * rows): 1,
    }


def test_another_head_than_the_automatic_one() -> None:
    from lightning_mp.training.tensor_parallel.plan import resolve_plan

    styles = resolve_plan(model(), {"*.head": "column_gather", "*.up": "whole", "*.down": "whole", "*": "auto"})
    assert styles["model.head"] == "column_gather"
    assert styles["model.token_embedding"] == "vocabulary"
    assert not [name for name in styles if ".mlp." in name]
