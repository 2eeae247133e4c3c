"""TokenPerplexity against float64, torch's cross-entropy and torchmetrics, on one process and two."""

import math
from importlib import import_module

import lightning.pytorch as pl
import pytest
import torch
from gloo import process_group, run_ranks
from small_models import TokenModel, loader, quiet_trainer, token_batches
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.text import Perplexity

from lightning_mp.metrics import TokenPerplexity, token_perplexity


def batch(seed: int, rows: int = 3, length: int = 8, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, length, vocabulary, generator=generator)
    target = torch.randint(vocabulary, (rows, length), generator=generator)
    target[:, length - seed % 4 :] = -100
    return logits, target


def in_float64(logits: torch.Tensor, target: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(logits.double().flatten(0, -2), target.flatten())
    return math.exp(loss.item())


def test_it_equals_float64_and_torchmetrics():
    logits, target = batch(2)
    ours = token_perplexity(logits, target)
    assert ours.dtype == torch.float64
    assert ours.item() == pytest.approx(in_float64(logits, target), rel=1e-6)
    theirs = Perplexity(ignore_index=-100)(logits, target)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_batches_of_different_length_count_by_token():
    batches = [batch(1), batch(2, rows=1, length=3), batch(3, rows=7)]
    batches[1][0].zero_()
    metric, theirs = TokenPerplexity(), Perplexity(ignore_index=-100)
    for logits, target in batches:
        metric.update(logits, target)
        theirs.update(logits, target)
    everything = torch.cat([logits.flatten(0, 1) for logits, _ in batches])
    targets = torch.cat([target.flatten() for _, target in batches])
    assert metric.compute().item() == pytest.approx(in_float64(everything, targets), rel=1e-6)
    assert metric.compute().item() == pytest.approx(theirs.compute().item(), rel=1e-5)
    mean_of_means = math.exp(sum(math.log(in_float64(*b)) for b in batches) / 3)
    assert metric.compute().item() != pytest.approx(mean_of_means, rel=0.1)
    assert metric.tokens.dtype == torch.int64
    assert metric.tokens == (targets != -100).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_computed_with_in_float32(dtype):
    logits, target = batch(2)
    narrow = logits.to(dtype)
    assert token_perplexity(narrow, target).item() == pytest.approx(in_float64(narrow, target), rel=1e-6)


@pytest.mark.parametrize("size", [200.0, 1e4, 3e38])
def test_tokens_far_from_the_top_keep_their_loss(size):
    """torchmetrics takes the logarithm of a softmax that is 0 here, and gives inf."""
    logits = torch.tensor([[size, 0.0], [0.0, 0.0]]).repeat(500, 1)
    target = torch.tensor([0, 1]).repeat(500)
    target[0] = 1
    expected = math.exp(min((size + 500 * math.log(2)) / 1000, 709)) if size < 1e6 else math.inf
    assert token_perplexity(logits, target).item() == pytest.approx(expected, rel=1e-6)
    assert Perplexity()(logits[None], target[None]) == math.inf
    metric = TokenPerplexity()
    metric.update(logits, target)
    assert metric.negative_log_likelihood.item() == pytest.approx(size + 500 * math.log(2), rel=1e-6)


def test_masked_vocabulary_and_ignored_rows_may_be_infinite():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan, 1.0, 2.0], [torch.inf, 0.0, 0.0]])
    assert token_perplexity(logits, torch.tensor([0, -100, -100])).item() == pytest.approx(2.0)
    assert token_perplexity(logits, torch.tensor([1, -100, -100])) == math.inf


def test_ignore_index_can_be_any_token_or_none():
    logits, target = batch(4)  # no padding
    kept = target != 3
    expected = in_float64(logits[kept], target[kept])
    assert token_perplexity(logits, target, ignore_index=3).item() == pytest.approx(expected, rel=1e-6)
    everything = token_perplexity(logits, target, ignore_index=None).item()
    assert everything == pytest.approx(in_float64(logits, target), rel=1e-6)
    with pytest.raises(RuntimeError, match="out of bounds|out of range"):
        token_perplexity(logits, target.fill_(-100), ignore_index=None)


def test_no_token_gives_nan():
    assert token_perplexity(torch.zeros(2, 5), torch.tensor([-100, -100])).isnan()
    assert token_perplexity(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).isnan()


def test_token_counts_and_sums_stay_exact_past_2_to_the_24():
    metric = TokenPerplexity()
    metric.tokens += 2**24
    metric.negative_log_likelihood += 2.0**24 * math.log(2)
    before = metric.negative_log_likelihood.item()
    metric.update(torch.zeros(1, 2), torch.tensor([1]))
    assert metric.tokens == 2**24 + 1
    assert metric.negative_log_likelihood.item() - before == pytest.approx(math.log(2), rel=1e-6)
    metric.bfloat16()
    assert (metric.tokens.dtype, metric.negative_log_likelihood.dtype) == (torch.int64, torch.float64)


def test_chunks_do_not_change_it_and_bound_the_temporaries(monkeypatch):
    logits, target = batch(2, rows=5)
    whole = token_perplexity(logits.half(), target).item()
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            assert func._schema.name != "aten::_local_scalar_dense"
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                largest = max(largest, out.numel())
            return out

    monkeypatch.setattr(import_module("lightning_mp.monitors.metrics.token_perplexity"), "_CHUNK_LOGITS", 25)
    half = logits.half()
    with Watch():
        chunked = token_perplexity(half, target)
    assert chunked.item() == pytest.approx(whole, rel=1e-12)
    assert largest == 2 * 11


def test_ranks_are_added_token_by_token():
    batches = [batch(1), batch(3, rows=7)]

    def count(rank):
        with process_group():
            metric = TokenPerplexity()
            metric.update(*batches[rank])
            return metric.compute().item()

    everything = torch.cat([logits.flatten(0, 1) for logits, _ in batches])
    targets = torch.cat([target.flatten() for _, target in batches])
    expected = pytest.approx(in_float64(everything, targets), rel=1e-6)
    assert run_ranks(count, 2) == [expected, expected]


def test_it_is_logged_by_lightning_like_any_metric():
    class Validating(TokenModel):
        def __init__(self):
            super().__init__()
            self.perplexity = TokenPerplexity()

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.perplexity.update(self.head(self.embedding(x)), y)
            self.log("val/perplexity", self.perplexity)

    module, batches = Validating(), token_batches([7, 3, 9])
    trainer: pl.Trainer = quiet_trainer()
    (results,) = trainer.validate(module, loader(batches), verbose=False)
    with torch.no_grad():
        logits = torch.cat([module.head(module.embedding(x)).flatten(0, 1) for x, _ in batches])
    expected = in_float64(logits, torch.cat([y.flatten() for _, y in batches]))
    assert results["val/perplexity"] == pytest.approx(expected, rel=1e-5)
