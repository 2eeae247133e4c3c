"""A GAN in fp16: two optimizers, manual optimization, one loss scale.

When: `training_step` steps its optimizers itself. Use `self.manual_backward` and the optimizers as usual; the plugin
scales both losses by the same scale, clips the unscaled gradients, and updates the scale once per batch, so that both
optimizers are unscaled correctly. An overflow skips only the step of the optimizer that it affects.

    python recipes/gan.py           # points on a ring, on any CPU, a few seconds
    python recipes/gan.py --full    # a larger network, on a GPU

Expected output (numbers vary):

    distance of generated points from the ring: 0.85 at first, 0.18 now
    generator stepped 199 times, discriminator 199 times, loss scale 32768
"""

import argparse
from collections import Counter

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision


def net(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class GAN(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.automatic_optimization = False
        self.generator = net(8, width, 2)
        self.discriminator = net(2, width, 1)
        self.made_steps = Counter()

    def sample(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, 8, device=self.device))

    def training_step(self, real, batch_idx):
        generator_optimizer, discriminator_optimizer = self.optimizers()
        fake = self.sample(len(real))

        # From logits, not probabilities: the logarithm of a rounded probability is inaccurate in fp16.
        of_real, of_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.softplus(-of_real).mean() + F.softplus(of_fake).mean()
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(discriminator_optimizer, gradient_clip_val=1.0)
        discriminator_optimizer.step()

        loss = F.softplus(-self.discriminator(fake)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator_optimizer, gradient_clip_val=1.0)
        generator_optimizer.step()

    def on_after_optimizer_step(self, optimizer, outcome):  # a hook of lightning_mp
        name = "generator" if optimizer is self.trainer.optimizers[0] else "discriminator"
        self.made_steps[name] += outcome.stepped

    def configure_optimizers(self):
        nets = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), 5e-3, betas=(0.0, 0.99), fused=True) for part in nets]

    @torch.no_grad()
    def distance(self) -> float:
        return float((self.sample(2048).norm(dim=1) - 1).abs().mean())


def main(full: bool) -> None:
    pl.seed_everything(0, verbose=False)
    width, batch_size, steps = (1024, 4096, 2000) if full else (64, 64, 200)
    angles = 2 * torch.pi * torch.rand(batch_size * steps)
    ring = torch.stack((angles.cos(), angles.sin()), dim=1)
    module = GAN(width)
    before = module.distance()
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[AutocastPrecision("16-mixed")],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    trainer.fit(module, DataLoader(ring, batch_size))
    made = module.made_steps
    print(f"distance of generated points from the ring: {before:.2f} at first, {module.distance():.2f} now")
    print(
        f"generator stepped {made['generator']} times, discriminator {made['discriminator']} times,"
        f" loss scale {trainer.precision_plugin.scaler.get_scale():.0f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
