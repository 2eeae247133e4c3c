"""The formulas for decoders against the measured step of every family that transformers ships.

They err towards "does not fit": at other shapes than those that their constants were measured at.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_mp import estimate_memory
from lightning_mp.planning import DecoderConfig, decoder_memory
from lightning_mp.planning.memory.families import FAMILIES

SEQUENCES, TOKENS, WIDTH = 2, 160, 128
#: What of the configuration of a family has which size.
SIZES: dict[int | str, tuple[str, ...]] = {
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    WIDTH: ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    4: (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
    ),
    "2": ("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"),
    "width of a head": ("head_dim", "rotary_dim"),
    "of an expert": ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
    "of the MLP": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
}
VALUES = {"2": 2, "width of a head": 32, "of an expert": 96, "of the MLP": 4 * WIDTH}
# Not shipped under that name, of several modalities, or with sizes that cannot be small.
LEFT_OUT = {"internlm2", "gemma3", "llama4", "ministral", "deepseek_v2", "deepseek_v3"}
MEASURED = sorted(FAMILIES.keys() - LEFT_OUT)


def small(family: str) -> Any:
    known = AutoConfig.for_model(family).to_dict()
    sizes: dict[str, Any] = {"vocab_size": 300, "use_cache": False}
    for size, names in SIZES.items():
        value = VALUES[size] if isinstance(size, str) else size
        sizes |= {name: value for name in names if name in known and (known[name] or name != "head_dim")}
    if family == "gpt_neo":
        sizes["attention_types"] = [[["global", "local"], 1]]
    sizes |= {name: 0 for name in ("bos_token_id", "eos_token_id") if name in known}
    sizes |= {name: None for name in ("pad_token_id", "layer_types") if name in known}
    return AutoConfig.for_model(family, **sizes)


def compare(family: str, precision: str) -> float:
    config = small(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)
    measured = estimate_memory(model, {"input_ids": ids, "labels": ids}, precision=precision, accumulate_grad_batches=2)
    tensors = max(sample.total_bytes - sample.bytes_by_part["workspaces"] for sample in measured.samples)
    shape = DecoderConfig.from_hugging_face(config.to_dict())
    formula = decoder_memory(shape, sequences=SEQUENCES, context_tokens=TOKENS, precision=precision)
    return formula.total_bytes / tensors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_the_formula_of_a_common_family_is_not_below_its_measured_step(family: str) -> None:
    assert 0.99 <= compare(family, "bf16-mixed") <= 1.4


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("family", MEASURED)
def test_no_formula_is_below_the_measured_step(family: str, precision: str) -> None:
    assert 0.99 <= compare(family, precision) <= 1.4
