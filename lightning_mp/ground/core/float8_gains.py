"""From which size of a layer fp8 gains in speed, and what it costs uncompiled: measured figures with their sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class SmallestGain:
    """From which size of both dimensions a linear layer multiplies faster in fp8 than in bf16, compiled."""

    features: int  # in_features and out_features are at least this
    source: str  # tokens per second beside bf16 by width of a transformer, all of its layers in fp8


_ROWWISE = SmallestGain(
    4096,
    "1.12x at 4,096 (torchtitan commit 7a04053, Llama 3 8B, 8 H100); 0.87x at 2,048 and 0.75x at 768 (H200, torch 2.11,"
    " GPT of 12 layers), 0.90x at 1,536 (karpathy/nanochat dev/LOG.md, 2026-02-02)",
)

#: By recipe. All of them lie inside of torchao's own filter (``_auto_filter_for_recipe``, torchao 0.18).
SMALLEST_GAIN: Mapping[str, SmallestGain] = MappingProxyType(
    {
        "tensorwise": SmallestGain(
            1536,
            "1.17x at 1,536 (karpathy/nanochat dev/LOG.md, 2026-02-02, 8 H100), 1.11x at 2,048 and 0.83x at 768 (H200,"
            " torch 2.11, GPT of 12 layers)",
        ),
        "rowwise": _ROWWISE,
        "rowwise_with_gw_hp": _ROWWISE,  # not measured alone: fewer of its products are fp8
    }
)

#: Said at set-up and by preflight.
UNCOMPILED_FP8 = (
    "no module is compiled. Without torch.compile rounding to fp8 costs more than the products gain: 0.18x of bf16's"
    " tokens per second (GPT-2 small, H200, torch 2.11). Compile blocks in configure_model: block.compile()."
)
