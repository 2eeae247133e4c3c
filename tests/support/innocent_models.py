"""Models with nothing wrong about them, of many kinds, as small as their kind allows: no monitor has anything to say.

``INNOCENT_MODELS`` has the LightningModules and batches by name.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processor import NO_16_BIT_LSTM, has_16_bit_lstm
from small_models import adamw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

WIDTH, CLASSES, VOCABULARY, TOKENS, BATCH = 16, 8, 32, 8, 4


class Trained(pl.LightningModule):
    """A net, and what its loss is on a batch."""

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    ) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


@dataclass(frozen=True)
class InnocentModel:
    """A kind of model.

    Attributes:
        make: the LightningModule, always with the same weights.
        batches: so many training batches, always the same.
        precisions: what it can be trained in on any CPU.
    """

    make: Callable[[], pl.LightningModule]
    batches: Callable[[int], list[Any]]
    precisions: tuple[str, ...] = ("16-mixed", "bf16-mixed")


def _kind(
    net: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Callable[[torch.Generator], Any],
    precisions: tuple[str, ...] = ("16-mixed", "bf16-mixed"),
) -> InnocentModel:
    def make() -> pl.LightningModule:
        torch.manual_seed(0)
        return Trained(net(), loss)

    return InnocentModel(make, _batches_of(batch), precisions)


def _batches_of(batch: Callable[[torch.Generator], Any]) -> Callable[[int], list[Any]]:
    def batches(count: int) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [batch(generator) for _ in range(count)]

    return batches


# -- batches -----------------------------------------------------------------------------------------------------------


def _vectors(g: torch.Generator) -> list[Tensor]:
    return [torch.randn(BATCH, WIDTH, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)]


def _images(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, 16, 16, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)


def _masks(g: torch.Generator) -> dict[str, Tensor]:
    image = torch.randn(BATCH, 3, 16, 16, generator=g)
    return {"image": image, "mask": (image.mean(1) > 0).long()}


def _sequences(g: torch.Generator) -> list[Tensor]:
    return [torch.randn(BATCH, TOKENS, WIDTH, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)]


def _tokens(g: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=g)
    return {"input_ids": ids, "labels": ids}


def _padded_tokens(g: torch.Generator) -> dict[str, Tensor]:
    """Of different lengths, with an attention mask, and some labels left out."""
    ids = torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=g)
    mask = (torch.arange(TOKENS) < torch.randint(3, TOKENS + 1, (BATCH, 1), generator=g)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _pairs(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    first = torch.randn(BATCH, WIDTH, generator=g)
    same = torch.randint(2, (BATCH,), generator=g)
    second = torch.where(same[:, None] == 1, first, -first) + 0.1 * torch.randn(BATCH, WIDTH, generator=g)
    return first, second, same


# -- losses ------------------------------------------------------------------------------------------------------------


def _classify(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def _own_loss(net: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = net(**batch).loss
    return loss


# -- nets --------------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), *_head(16)),
    )


def _mobile_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Hardswish()),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.Conv2d(8, 16, 1), nn.SiLU(), *_head(16)),
    )


class _ViT(nn.Module):
    """A class token and a positional embedding that no operation casts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.position
        logits: Tensor = self.head(self.norm(self.encoder(tokens))[:, 0])
        return logits


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.LeakyReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        logits: Tensor = self.out(torch.cat([high, self.up(self.deep(high))], 1))
        return logits


def _segment(net: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy and a soft Dice loss."""
    logits = net(batch["image"])
    probability = logits.float().softmax(1)[:, 1]
    overlap = 2 * (probability * batch["mask"]).sum() + 1
    return F.cross_entropy(logits, batch["mask"]) + 1 - overlap / (probability.sum() + batch["mask"].sum() + 1)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], **settings: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True, **settings)
        self.head = nn.LazyLinear(CLASSES)
        self.head(torch.zeros(1, WIDTH * (1 + self.cell.bidirectional)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(x)[0].mean(1))
        return logits


def _lstm() -> nn.Module:
    if not has_16_bit_lstm():
        pytest.skip(NO_16_BIT_LSTM)
    return _Recurrent(nn.LSTM, num_layers=2, dropout=0.1)


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).float().chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(sample), mean, log_variance


def _elbo(net: nn.Module, batch: Any) -> Tensor:
    out, mean, log_variance = net(batch[0])
    divergence: Tensor = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return F.mse_loss(out, batch[0]) + 0.1 * divergence


class GAN(pl.LightningModule):
    """Two optimizers and manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        critics, generators = self.optimizers()
        fake = self.generator(torch.randn(len(batch[0]), 8))
        real, generated = self.critic(batch[0]), self.critic(fake.detach())
        loss = F.softplus(-real.float()).mean() + F.softplus(generated.float()).mean()
        for optimizer, value in ((critics, loss), (generators, None)):
            optimizer.zero_grad()
            self.manual_backward(F.softplus(-self.critic(fake).float()).mean() if value is None else value)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.critic, self.generator)]


class _CausalAttention(nn.Module):
    """Written by hand, with a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(WIDTH) + self.mask
        out: Tensor = self.out(scores.softmax(-1).to(v.dtype) @ v)
        return out


class _TiedModel(nn.Module):
    """A decoder whose head is its embedding, with its block in an activation checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention, self.norm = _CausalAttention(), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + checkpoint(self.attention, self.norm(x), use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


def _next_token(net: nn.Module, batch: Any) -> Tensor:
    ids = batch["input_ids"]
    return F.cross_entropy(net(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class _Experts(nn.Module):
    """Top-2 of four experts, and a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probability = self.router(x).float().softmax(-1)
        weight, chosen = probability.topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).to(x.dtype) * weight[rows, place, None].to(x.dtype))
        load = F.one_hot(chosen[:, 0], 4).float().mean(0)
        return self.head(out), 4 * (load * probability.mean(0)).sum()


def _route(net: nn.Module, batch: Any) -> Tensor:
    logits, balance = net(batch[0])
    return F.cross_entropy(logits, batch[1]) + 0.01 * balance


class _LoRA(nn.Module):
    """A frozen layer and two narrow trained ones beside it, the second from zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return out


def _contrast(net: nn.Module, batch: Any) -> Tensor:
    """Distances of pairs, and of everything to everything."""
    first, second, same = net(batch[0]), net(batch[1]), batch[2]
    distance = F.pairwise_distance(first.float(), second.float())
    loss = torch.where(same == 1, distance.square(), F.relu(1 - distance).square()).mean()
    return loss + 0.01 * torch.cdist(first, second).mean()


class _Clip(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        return self.temperature.exp() * left @ right.T


def _match(net: nn.Module, batch: Any) -> Tensor:
    logits = net(batch[0], batch[1])
    rows = torch.arange(len(logits))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


class _Detector(nn.Module):
    """Per cell of a grid: is something there, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.objectness, self.box = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.features(x)
        return {"objectness": self.objectness(features), "box": self.box(features).exp()}


def _targets(g: torch.Generator) -> dict[str, Tensor]:
    objectness = (torch.rand(BATCH, 1, 8, 8, generator=g) < 0.1).float()
    return {
        "image": torch.randn(BATCH, 3, 16, 16, generator=g),
        "objectness": objectness,
        "box": torch.rand(BATCH, 4, 8, 8, generator=g),
    }


def _detect(net: nn.Module, batch: Any) -> Tensor:
    """Focal loss, and smooth L1 where there is something."""
    out = net(batch["image"])
    plain = F.binary_cross_entropy_with_logits(out["objectness"].float(), batch["objectness"], reduction="none")
    focal = (1 - (-plain).exp()).square() * plain
    boxes = F.smooth_l1_loss(out["box"].float(), batch["box"], reduction="none") * batch["objectness"]
    return focal.mean() + boxes.sum() / batch["objectness"].sum().clamp(min=1)


class _GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        sender, receiver = self.edges
        hidden = self.first(x).relu().float()
        degree = torch.zeros(len(x)).index_add(0, receiver, torch.ones(receiver.shape))
        summed = torch.zeros_like(hidden).index_add(0, receiver, hidden[sender])
        logits: Tensor = self.second(summed / degree.clamp(min=1)[:, None])
        return logits


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(VOCABULARY, WIDTH), nn.EmbeddingBag(VOCABULARY, WIDTH)
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.PReLU(), nn.Linear(WIDTH, 1))

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        logits: Tensor = self.tower(torch.cat([self.users(user), self.items(items)], -1))[:, 0]
        return logits


def _clicks(g: torch.Generator) -> list[Tensor]:
    return [
        torch.randint(VOCABULARY, (BATCH,), generator=g),
        torch.randint(VOCABULARY, (BATCH, 3), generator=g),
        torch.randint(2, (BATCH,), generator=g).float(),
    ]


class _Denoiser(nn.Module):
    """A diffusion model's net: sines of the time, modulated norms."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
        out: Tensor = self.body(self.norm(x) * (1 + scale) + shift)
        return out


def _denoise(net: nn.Module, batch: Any) -> Tensor:
    noise, time = torch.randn_like(batch[0]), torch.rand(len(batch[0]))
    kept = (math.pi / 2 * time).cos()[:, None]
    noisy = kept * batch[0] + (1 - kept.square()).clamp(min=1e-4).sqrt() * noise
    return F.mse_loss(net(noisy, 100 * time), noise)


class _Speech(nn.Module):
    """Convolutions over time with normalised weights, and CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
        self.second = parametrizations.spectral_norm(nn.Conv1d(WIDTH, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(F.elu(self.first(x.transpose(1, 2))))
        return logits.float().log_softmax(1).permute(2, 0, 1)


def _transcribe(net: nn.Module, batch: Any) -> Tensor:
    labels = 1 + batch[1][:, None].clamp(max=CLASSES - 2)
    lengths = torch.full((BATCH,), TOKENS), torch.ones(BATCH, dtype=torch.long)
    return F.ctc_loss(net(batch[0]), labels, *lengths)


def _gan() -> InnocentModel:
    return InnocentModel(GAN, _batches_of(_vectors))


_HF: dict[str, Any] = {"vocab_size": VOCABULARY}
_LLAMA: dict[str, Any] = _HF | {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": TOKENS,
}


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(**_HF, n_positions=TOKENS, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    )


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_LLAMA))


def _mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(**_LLAMA, num_local_experts=4, output_router_logits=True, experts_implementation="eager")
    )


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(**_HF, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def _bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            **_HF,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=TOKENS,
        )
    )


def _mlp(*wrapped: nn.Module) -> nn.Module:
    return nn.Sequential(*(wrapped or (nn.Linear(WIDTH, WIDTH),)), nn.GELU(), nn.Linear(WIDTH, CLASSES))


INNOCENT_MODELS: dict[str, InnocentModel] = {
    "multi-layer perceptron": _kind(_mlp, _classify, _vectors),
    "CNN with BatchNorm": _kind(_cnn, _classify, _images),
    "residual CNN": _kind(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), _Residual(8), _Residual(8), *_head(8)), _classify, _images
    ),
    "depthwise CNN": _kind(_mobile_cnn, _classify, _images),
    "ViT": _kind(_ViT, _classify, _images),
    "ViT with dropout": _kind(lambda: _ViT(dropout=0.1), _classify, _images),
    "TransformerEncoderLayer with dropout": _kind(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True), nn.Flatten(), nn.Linear(128, CLASSES)
        ),
        _classify,
        _sequences,
    ),
    "U-Net": _kind(_UNet, _segment, _masks),
    # oneDNN has no fp16 LSTM on most CPUs.
    "LSTM": _kind(_lstm, _classify, _sequences, ("bf16-mixed",)),
    "bidirectional GRU": _kind(lambda: _Recurrent(nn.GRU, bidirectional=True), _classify, _sequences),
    "variational autoencoder": _kind(_VAE, _elbo, _vectors),
    "GAN, manual optimization": _gan(),
    "GPT-2": _kind(_gpt2, _own_loss, _tokens),
    "Llama": _kind(_llama, _own_loss, _padded_tokens),
    "T5": _kind(_t5, _own_loss, _padded_tokens),
    "BERT": _kind(_bert, _own_loss, _padded_tokens),
    "Mixtral": _kind(_mixtral, _own_loss, _tokens),
    "mixture of experts by hand": _kind(_Experts, _route, _vectors),
    "LoRA": _kind(lambda: _mlp(_LoRA(nn.Linear(WIDTH, WIDTH))), _classify, _vectors),
    "siamese": _kind(_mlp, _contrast, _pairs),
    "two towers with a temperature": _kind(_Clip, _match, _pairs),
    "detection head": _kind(_Detector, _detect, _targets),
    "tied weights, checkpointed": _kind(_TiedModel, _next_token, _tokens),
    "graph network": _kind(_GraphNet, _classify, _vectors),
    "recommender": _kind(
        _Recommender, lambda net, b: F.binary_cross_entropy_with_logits(net(b[0], b[1]), b[2]), _clicks
    ),
    "diffusion": _kind(_Denoiser, _denoise, _vectors),
    "speech with CTC": _kind(_Speech, _transcribe, _sequences),
}
