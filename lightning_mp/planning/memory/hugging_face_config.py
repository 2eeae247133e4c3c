"""The shape of a decoder in the ``config.json`` of a Hugging Face model."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mp.planning.memory.latent_attention import LatentAttention

# What configurations of Hugging Face call each field; the first that is there counts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
    "ffn_width": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "experts_per_token"),
}
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
_WITH_BIASES = (*_LEARNED_POSITIONS, "bloom", "gpt_neox", "starcoder2")
_WITHOUT_GATES = (*_WITH_BIASES, *("codegen", "falcon", "gpt_neo", "gptj", "mpt", "nemotron", "persimmon", "phi"))
_WITH_GATES = (
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "gemma3_text", "glm4"),
    *("glm4_moe", "gpt_oss", "granite", "granitemoe", "internlm2", "llama", "llama4", "llama4_text", "ministral"),
    *("mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "smollm3", "stablelm"),
)
# Their configurations leave `tie_word_embeddings` out where it is true.
_TIED = (
    *("bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode"),
    *("gpt_neo", "mpt", "opt", "starcoder2"),
)
_NO_DECODERS = (
    "albert",
    "bert",
    "camembert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "roberta",
)
_OTHER_BLOCKS = ("mamba", "ssm_", "linear_num_", "hybrid_", "conv_kernel", "state_size", "ffn_config", "block_types")


def read_config(path: str | Path) -> Mapping[str, Any]:
    """The content of a file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is not a JSON file. Pass the config.json of a Hugging Face model.") from None
    return content if isinstance(content, dict) else {}


def decoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a :class:`~lightning_mp.planning.DecoderConfig` that a configuration tells.

    Warns:
        UserWarning: the kind of model is not known, so that some is taken to be as in Llama.

    >>> fields = decoder_fields({"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048,
    ...                          "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
    ...                          "intermediate_size": 16384, "vocab_size": 256000})
    >>> fields["kv_heads"], fields["tied_head"]
    (1, True)
    """
    told: Mapping[str, Any] = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    kind = str(told.get("model_type", ""))
    _refuse_other_models(config, told, kind)
    fields: dict[str, Any] = {field: _count(told, *names) for field, names in _NAMES.items()}
    missing = [_NAMES[name][0] for name in ("layers", "width", "heads", "vocabulary") if not fields[name]]
    if missing:
        raise ValueError(
            f"The configuration does not contain {', '.join(missing)}. Pass the config.json of a decoder, or layers,"
            " width and vocabulary."
        )
    if told.get("multi_query") and not told.get("new_decoder_architecture"):
        fields["kv_heads"] = 1
    if kind and kind not in (*_WITH_GATES, *_WITHOUT_GATES):
        warnings.warn(
            f"model_type {kind!r} is not known. Its MLPs are assumed to be gated and, unless the configuration says"
            " otherwise, its output layer untied: compare the number of parameters with the published one.",
            stacklevel=3,
        )
    learned = kind in _LEARNED_POSITIONS
    return {
        **fields,
        **_mixture(told, fields),
        "latent_attention": _latent_attention(told),
        "gated": kind not in _WITHOUT_GATES,
        "tied_head": bool(told.get("tie_word_embeddings", config.get("tie_word_embeddings", kind in _TIED))),
        "biases": kind in _WITH_BIASES,
        "positions": _count(told, "n_positions", "max_position_embeddings") if learned else 0,
        "dropout": bool(told.get("resid_pdrop", 0.1 if kind == "gpt2" else 0)),
    }


def _refuse_other_models(config: Mapping[str, Any], told: Mapping[str, Any], kind: str) -> None:
    if config.get("is_encoder_decoder") or kind in _NO_DECODERS:
        raise ValueError(
            f"The configuration describes {kind or 'a model'}, which has an encoder; the formulas are for decoders."
            " Measure the module: estimate_memory(module, batch), or lightning-mp memory --module."
        )
    other = next((name for name in told if name.startswith(_OTHER_BLOCKS) and told[name] is not None), None)
    if other is not None:
        raise ValueError(
            f"The configuration contains {other!r}: its blocks are not attention and MLPs, which the"
            " formulas are for. Measure the module: estimate_memory(module, batch), or lightning-mp memory --module."
        )


def _count(told: Mapping[str, Any], *names: str) -> int:
    """The first that is there; 0 where none is."""
    for name in names:
        value = told.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"The configuration's {name} must be a whole number, got {value!r}.")
        return value
    return 0


def _mixture(told: Mapping[str, Any], fields: Mapping[str, int]) -> dict[str, int]:
    """Blocks of a mixture that have a dense MLP, and MLPs that every token uses beside its experts."""
    if not fields["experts"]:
        return {"ffn_width": _count(told, *_NAMES["ffn_width"][1:])}
    shared = _count(told, "shared_expert_intermediate_size")
    if not shared:
        alone = 1 if "interleave_moe_layer_step" in told else 0  # Llama 4 has one and does not tell
        shared = (_count(told, "n_shared_experts") or alone) * fields["ffn_width"]
    dense = sum(not _is_mixture(told, block) for block in range(fields["layers"]))
    return {
        "shared_ffn_width": shared,
        "dense_layers": dense,
        "dense_ffn_width": _count(told, "intermediate_size_mlp", "intermediate_size") if dense else 0,
    }


def _is_mixture(told: Mapping[str, Any], block: int) -> bool:
    if block < _count(told, "first_k_dense_replace") or block in (told.get("mlp_only_layers") or ()):
        return False
    if told.get("moe_layers"):
        return block in told["moe_layers"]
    every_from_the_first = _count(told, "moe_layer_freq") or 1
    every_from_the_last = _count(told, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    return block % every_from_the_first == 0 and (block + 1) % every_from_the_last == 0


def _latent_attention(told: Mapping[str, Any]) -> LatentAttention | None:
    if not told.get("kv_lora_rank"):
        return None
    missing = [name for name in _LATENT if told.get(name) is None]
    if missing:
        raise ValueError(f"The configuration contains kv_lora_rank, but not {', '.join(missing)}.")
    sizes = {name: _count(told, name) for name in (*_LATENT, "q_lora_rank")}
    return LatentAttention(**sizes)
