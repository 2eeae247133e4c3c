"""Promise: a comparison runs on projects of every kind, or says at once why it cannot."""

import lightning.pytorch as pl
import pytest
import torch
from compared_models import TinyClassifier, pictures
from small_models import StepsByHand, Trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import compare_precisions


def loader(count=8, batch_size=4):
    return DataLoader(pictures(count), batch_size=batch_size)


def compare(module, data=None, **others):
    """Three steps: one and a half epochs."""
    arguments = {"steps": 3, "seeds": 1, "rounds": 1, "accelerator": "cpu", **others}
    return compare_precisions(module, loader() if data is None else data, **arguments)


class OneArgument(TinyClassifier):
    """Lightning passes no index to a step that takes none."""

    def training_step(self, batch):
        return super().training_step(batch, 0)


class Closures(TinyClassifier):
    """An optimizer that calls its closure as often as it likes."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


class Lazy(TinyClassifier):
    """Its first batch draws the weights of the head."""

    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(2)


class Manual(StepsByHand, TinyClassifier):
    pass


class GAN(pl.LightningModule):
    """A generator and a discriminator of pairs of numbers; a tuple is a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(2, 2), nn.Linear(2, 1)

    def judged(self, pairs, label):
        logits = self.discriminator(pairs).float()
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.generator(torch.randn_like(real))
        first, second = self.optimizers()
        for optimizer, loss in (
            (first, lambda: self.judged(fake, 1.0)),
            (second, lambda: self.judged(real, 1.0) + self.judged(fake.detach(), 0.0)),
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch, batch_idx):
        self.log("val/distance", (self.generator(torch.randn_like(batch[0])).mean(0) - batch[0].mean(0)).norm())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)], []


class OnPlateau(TinyClassifier):
    """Its learning rate follows the validation loss."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


def sparse_gradients():
    """A dict is a batch; the gradient of the embedding is a sparse tensor."""
    return Trained(
        lambda m, batch: F.cross_entropy(m.head(m.embedding(batch["input_ids"])).float(), batch["labels"]),
        embedding=lambda: nn.Embedding(20, 8, sparse=True),
        head=lambda: nn.Linear(8, 20),
    )


class NoLoss(TinyClassifier):
    def training_step(self, batch, batch_idx):
        return None


class NeverSteps(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(TinyClassifier.training_step(self, batch, batch_idx))


@pytest.mark.parametrize(
    "module", [OneArgument, pytest.param(Closures, marks=pytest.mark.full), pytest.param(Lazy, marks=pytest.mark.full)]
)
def test_a_loss_per_batch(module):
    found = compare(module)
    assert [len(run.train_losses) for run in found.runs] == [3, 3]
    assert found.runs[0].train_losses[0] == pytest.approx(found.runs[1].train_losses[0], rel=0.02)


def test_manual_optimization_is_compared_by_a_validation_metric():
    found = compare(Manual, monitor="val/loss", val_data=loader(16))
    assert [run.train_losses for run in found.runs] == [(), ()]
    assert abs(found.quality["bf16-mixed"].difference.mean) < 0.05
    assert found.costs["bf16-mixed"].gradient_error > 0
    assert found.time_to_equal_loss("bf16-mixed") is None


def test_sparse_gradients_have_an_error_and_the_bar_shows_what_runs(capsys):
    batch = {name: torch.tensor([1, 2, 1]) for name in ("input_ids", "labels")}
    found = compare(sparse_gradients, batch, steps=None, progress=True)
    assert found.costs["32-true"].gradient_error < 1e-6 < found.costs["bf16-mixed"].gradient_error < 0.02
    bar = capsys.readouterr().err
    assert "bf16-mixed, timed" in bar
    assert "0/14" in bar  # two warm-up and five timed steps of each


@pytest.mark.full
def test_two_optimizers(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 2, generator=torch.Generator().manual_seed(0))), batch_size=4)
    found = compare(GAN, data, steps=6, monitor="val/distance", val_data=data)
    assert [run.items for run in found.runs] == [3 * 4] * 2  # steps of both are counted
    found.plot(tmp_path / "gan.png")
    costs = compare(GAN, next(iter(data)), steps=None).costs
    assert 0 < costs["bf16-mixed"].gradient_error < 0.02


@pytest.mark.full
def test_a_learning_rate_that_follows_a_validation_metric_is_told_how():
    validation = loader(16)
    message = "`module` needs a metric that is not there: .*val/loss.* pass trainer_options={'check_val_every"
    with pytest.raises(ValueError, match=message):
        compare(OnPlateau, val_data=validation)
    options = {"check_val_every_n_epoch": 1, "val_check_interval": 1.0}
    assert compare(OnPlateau, val_data=validation, trainer_options=options).quality


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "`module` is optimized manually and its training_step returns no loss.* Pass monitor= and a valid"),
        (NoLoss, "`module` returned no loss from training_step, so nothing was trained. Return the loss, or a dict"),
        (NeverSteps, "`module` made no optimizer step in a whole epoch. In manual optimization step what self.optim"),
    ],
)
def test_what_cannot_be_compared(module, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        compare(module, file=tmp_path / "runs.jsonl")
    assert not (tmp_path / "runs.jsonl").exists()


class Fails(TinyClassifier):
    def training_step(self, batch, batch_idx):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


def test_an_error_of_the_module_names_the_run():
    with pytest.raises(RuntimeError, match="out of luck") as error:
        compare(Fails)
    assert error.value.__notes__ == ["This was the run in 'bf16-mixed' with seed 0 of compare_precisions()."]
