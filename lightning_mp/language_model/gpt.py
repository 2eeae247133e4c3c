"""A small GPT (pre-norm blocks, causal attention, tied head, no biases), and text written by it."""

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mp.ground.core.arguments import whole_number

# Multiples of 16 suit every 16-bit and fp8 kernel; from 256 on heads are 64 wide.
_WIDTHS = (*range(16, 64, 16), *range(64, 256, 32), *range(256, 2**13, 64))
_INIT_STD = 0.02  # GPT-2: Radford et al. 2019 and the released code


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a :class:`GPT`."""

    layers: int
    heads: int  # of attention, per layer
    width: int  # of the residual stream
    block_tokens: int = 128  # of the longest sequence
    vocab: int = 256  # token ids: bytes

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            whole_number(value, name, "GPTConfig")
        if self.width % self.heads:
            raise ValueError(f"GPTConfig(width={self.width}): it must be a multiple of the {self.heads} heads.")

    @override
    def __str__(self) -> str:
        return f"layers: {self.layers}, heads: {self.heads}, width: {self.width}"

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, the tied head counted once.

        >>> GPTConfig(layers=12, heads=12, width=768, block_tokens=1024, vocab=50257).parameters
        124337664
        """
        per_block = 4 * self.width**2 + 8 * self.width**2 + 2 * self.width  # attention, MLP, two norms
        return self.layers * per_block + (self.vocab + self.block_tokens + 1) * self.width


def config_for_parameters(parameters: int, *, block_tokens: int = 128, vocab: int = 256) -> GPTConfig:
    """Picks a shape with about that many trainable parameters, the tied head counted once.

    Within 5% of the wished size any shape will do, and of those the one in GPT-2 small's proportion (768 wide, 12 deep)
    wins: least is ``|log(width / depth / 64)| + 20 * max(0, |log(size / parameters)| - 0.05)``.

    >>> config_for_parameters(124_000_000, block_tokens=1024, vocab=50257)
    GPTConfig(layers=12, heads=12, width=768, block_tokens=1024, vocab=50257)
    """
    smallest = GPTConfig(1, 1, _WIDTHS[0], block_tokens, vocab)
    if parameters < smallest.parameters:
        raise ValueError(
            f"a model of {parameters} parameters cannot be built: the smallest has {smallest.parameters} (1 layer,"
            f" width {smallest.width}, {vocab} token ids, blocks of {block_tokens}); use at least that many."
        )

    def deepened(width: int) -> GPTConfig:
        heads = width // 64 if width >= 256 else min(4, max(1, width // 24))
        one_layer = GPTConfig(1, heads, width, block_tokens, vocab)
        more_layers = max(0, round((parameters - one_layer.parameters) / (12 * width**2 + 2 * width)))
        return replace(one_layer, layers=1 + more_layers)

    def cost(shape: GPTConfig) -> float:
        excess = max(0.0, abs(math.log(shape.parameters / parameters)) - 0.05)
        return abs(math.log(shape.width / shape.layers / 64)) + 20 * excess

    return min(map(deepened, _WIDTHS), key=cost)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token attends to itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_width = config.width // config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to ``[batch, tokens, width]``."""
        # Heads are not counted: under tensor parallelism a rank has some of them.
        qkv = self.query_key_value(x).unflatten(-1, (3, -1, self.head_width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Sequential):
    """Two matrices with a GELU (tanh form, as in GPT-2) between them."""

    def __init__(self, config: GPTConfig) -> None:
        up = nn.Linear(config.width, 4 * config.width, bias=False)
        down = nn.Linear(4 * config.width, config.width, bias=False)
        super().__init__(OrderedDict(up=up, gelu=nn.GELU(approximate="tanh"), down=down))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to ``[batch, tokens, width]``."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A decoder-only language model in the shape of GPT-2 (Radford et al. 2019), without biases and dropout.

    Weights start as in GPT-2: normal with standard deviation 0.02, the two projections that write into the residual
    stream divided by ``sqrt(2 * layers)``. The head shares the token table's weights.

    >>> import torch
    >>> model = GPT(GPTConfig(layers=2, heads=2, width=32))
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.block_tokens, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.token_embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=_INIT_STD / math.sqrt(2 * config.layers))

    @override
    def forward(self, idx: Tensor) -> Tensor:
        """Token ids ``[batch, tokens]`` to next-token logits ``[batch, tokens, vocab]``."""
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def embed(self, idx: Tensor) -> Tensor:
        """Token ids ``[batch, tokens]`` to ``[batch, tokens, width]``."""
        tokens, most = idx.shape[-1], self.config.block_tokens
        if tokens > most:
            raise ValueError(
                f"a sequence of {tokens} tokens was given to a model for at most {most}: cut it, or build the model "
                "with a larger block_tokens."
            )
        embedded: Tensor = self.token_embedding(idx) + self.position_embedding.weight[:tokens]
        return embedded


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, num_tokens: int, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> bytes:
    """Continues a text byte by byte, each drawn from the ``top_k`` most likely; the model is over bytes, on the CPU."""
    if not prompt:
        raise ValueError("generate() got an empty prompt: give at least one byte to continue.")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens[-model.config.block_tokens :]]))[0, -1].float()
        values, indices = logits.topk(min(top_k, logits.numel()))
        drawn = torch.multinomial((values / temperature).softmax(dim=-1), 1, generator=generator)
        tokens.append(int(indices[drawn]))
    return bytes(tokens)
