"""Text written by a model."""

import torch
from torch import Tensor

from lightning_mp.demo.model import GPT

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, num_tokens: int, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> bytes:
    """Continues a text byte by byte, on the CPU or wherever the model is.

    Args:
        model: A model over bytes.
        prompt: What to continue, at least one byte.
        num_tokens: How much to write.
        temperature: Below 1 favours what is likely.
        top_k: Only this many most likely bytes are drawn from.
        seed: For the draws.

    Returns:
        Prompt and continuation.

    Raises:
        ValueError: If the prompt is empty.
    """
    if not prompt:
        raise ValueError("generate() got an empty prompt: give at least one byte to continue.")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(list(prompt), device=device)
    for _ in range(num_tokens):
        logits = model(tokens[None, -model.config.block_tokens :])[0, -1]
        tokens = torch.cat([tokens, _draw(logits, temperature, top_k, generator).to(device)])
    return bytes(tokens.tolist())


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    values, indices = logits.float().cpu().topk(min(top_k, logits.numel()))
    chosen = torch.multinomial((values / temperature).softmax(dim=-1), 1, generator=generator)
    return indices[chosen]
