"""The shape of a decoder from its numbers or its configuration: parameters, and what one token saves for backward."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_mp.ground.core.arguments import true_or_false, whole_number
from lightning_mp.planning.memory.families import FAMILIES, Trait


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """How many weights a decoder has, and where.

    Raises:
        ValueError: a number is negative, or there are no layers or no width.

    Example:
        Llama 2 7B: 4 w^2 of attention and 3 w 11008 of the MLP in a block.

        >>> size = DecoderSize.of(6_738_415_616, layers=32, width=4096, vocabulary=32000)
        >>> size.block_matmul_weights == 4 * 4096**2 + 3 * 4096 * 11008, size.other_weights, size.parameters
        (True, 4096, 6738415616)
    """

    layers: int  #: Number of blocks.
    width: int  #: Size of the residual stream.
    vocabulary: int  #: Number of token ids.
    block_matmul_weights: int  #: Of one block: those in matrix products.
    block_norm_weights: int  #: Of one block: those of its norms.
    table_weights: int  #: The token table; the output layer as well if it is tied to it.
    head_weights: int = 0  #: The output layer, if it is not tied.
    other_weights: int = 0  #: Outside of the blocks: last norm, positions.
    unrouted_weights: int = 0  #: Of all blocks: those of experts that a token is not routed to.

    def __post_init__(self) -> None:
        for name in self.__slots__:
            minimum = 1 if name in ("layers", "width", "vocabulary") else 0
            whole_number(getattr(self, name), name, "DecoderSize", minimum=minimum)

    @classmethod
    def of(cls, parameters: int, *, layers: int, width: int, vocabulary: int, tied_head: bool = False) -> "DecoderSize":
        """From published sizes of a model: two norms of one vector per block, one after the last, no biases.

        Weights that remain after embeddings and norms are divided among the blocks.

        Raises:
            ValueError: embeddings and norms alone have more than ``parameters``.
        """
        for name, value in (("layers", layers), ("width", width), ("vocabulary", vocabulary)):
            whole_number(value, name)
        table = vocabulary * width
        head = 0 if tied_head else table
        norms = 2 * width
        left = int(parameters) - table - head - width - layers * norms
        if left < layers:
            raise ValueError(
                f"`parameters` ({int(parameters)}) leaves nothing for {layers} blocks: a vocabulary of {vocabulary} and"
                f" a width of {width} take {table + head + width + layers * norms}. Check the numbers."
            )
        return cls(layers, width, vocabulary, left // layers, norms, table, head, width + left % layers)

    @property
    def parameters(self) -> int:
        """Total number of weights, a tied head counted once."""
        blocks = self.layers * (self.block_matmul_weights + self.block_norm_weights)
        return blocks + self.table_weights + self.head_weights + self.other_weights

    @property
    def matmul_weights(self) -> int:
        """The N of the FLOPs conventions: blocks and output layer; in a mixture, those that a token is routed to."""
        head = self.head_weights or self.table_weights
        return self.layers * self.block_matmul_weights + head - self.unrouted_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention, under the names of a Hugging Face configuration.

    Raises:
        ValueError: a number is not a positive integer.

    Source:
        DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and equations 37 to 47.

    Example:
        DeepSeek-V3 has 128 heads on a width of 7168:

        >>> attention = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ...                             q_lora_rank=1536)
        >>> attention.weights(width=7168, heads=128)
        187105280
    """

    kv_lora_rank: int  #: of the vector that keys and values are made from.
    qk_nope_head_dim: int  #: of the part of a query and a key without rotary positions.
    qk_rope_head_dim: int  #: of the part with them; that of a key is the same for all heads.
    v_head_dim: int  #: of a value.
    q_lora_rank: int = 0  #: of the vector that queries are made from; 0 makes them from the residual stream.

    def __post_init__(self) -> None:
        for name in self.__slots__:
            minimum = 0 if name in ("q_lora_rank", "qk_rope_head_dim") else 1
            whole_number(getattr(self, name), name, "LatentAttention", minimum=minimum)

    @property
    def query_width(self) -> int:
        """Width of the query, and of the key, of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def norm_weights(self) -> int:
        """Weights of the norms of the two latent vectors."""
        return self.kv_lora_rank + self.q_lora_rank

    def weights(self, width: int, heads: int) -> int:
        """Weights in the matrix products of one block."""
        if self.q_lora_rank:
            queries = self.q_lora_rank * (width + heads * self.query_width)
        else:
            queries = width * heads * self.query_width
        latent = width * (self.kv_lora_rank + self.qk_rope_head_dim)
        keys_and_values = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latent + keys_and_values + heads * self.v_head_dim * width

    def saved_elements_per_token(self, heads: int) -> tuple[int, int]:
        """Elements that one block saves for backward: for all heads, and for the latent vectors, which every rank has.

        These are queries, keys, values and outputs of each head, and each latent vector before and after its norm.
        """
        return heads * 2 * (self.query_width + self.v_head_dim), 2 * self.norm_weights


_HEAD_WIDTH = 128
_MAY_BE_0 = (
    *("heads", "kv_heads", "head_width", "ffn_width", "experts", "active_experts", "shared_ffn_width"),
    *("dense_layers", "dense_ffn_width", "positions"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder-only transformer. Sizes that are left out are derived as in most models.

    Raises:
        ValueError: a number is negative, or sizes do not divide each other.

    Example:
        >>> llama3 = DecoderConfig(layers=32, width=4096, vocabulary=128256, heads=32, kv_heads=8, ffn_width=14336)
        >>> llama3.parameters
        8030261248
    """

    layers: int  #: blocks.
    width: int  #: of the residual stream.
    vocabulary: int  #: token ids.
    heads: int = 0  #: of queries; one per 128 of width when 0.
    kv_heads: int = 0  #: of keys and values; as many as queries when 0.
    head_width: int = 0  #: of one head; width over heads when 0.
    #: between the two or three matrices of an MLP, of one expert in a mixture; 4 widths when 0, or 8/3 with gates.
    ffn_width: int = 0
    gated: bool = True  #: the MLP has three matrices.
    experts: int = 0  #: MLPs of a mixture; 0 is one dense MLP.
    active_experts: int = 0  #: that one token is routed to.
    shared_ffn_width: int = 0  #: of the MLP that every token uses beside its experts.
    dense_layers: int = 0  #: blocks that have a dense MLP in place of a mixture.
    dense_ffn_width: int = 0  #: of the MLP in these.
    #: sizes of multi-head latent attention; None is attention with a key and a value per head.
    latent_attention: LatentAttention | None = None
    tied_head: bool = False  #: the output layer is the token table.
    biases: bool = False  #: of linear layers and norms.
    positions: int = 0  #: number of learned positions.
    dropout: bool = False  #: masks are saved.
    #: ``model_type`` of a Hugging Face configuration: what its code saves beside what its mathematics needs.
    family: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("layers", "width", "vocabulary", *_MAY_BE_0):
            whole_number(getattr(self, name), name, minimum=0 if name in _MAY_BE_0 else 1)
        for name in ("gated", "tied_head", "biases", "dropout"):
            true_or_false(getattr(self, name), name)
        heads = self.heads or max(1, self.width // _HEAD_WIDTH)
        if self.heads and self.width % heads and not (self.head_width or self.latent_attention):
            raise ValueError(
                f"`width` ({self.width}) must be a multiple of `heads`, got {heads}, or give `head_width`."
            )
        set_ = object.__setattr__
        set_(self, "heads", heads)
        set_(self, "kv_heads", self.kv_heads or heads)
        latent = self.latent_attention
        set_(self, "head_width", latent.query_width if latent else self.head_width or self.width // heads)
        set_(self, "ffn_width", self.ffn_width or (8 * self.width // 3 if self.gated else 4 * self.width))
        set_(self, "active_experts", self.active_experts or min(2, self.experts))
        if heads % self.kv_heads:
            raise ValueError(f"`heads` ({heads}) must be a multiple of `kv_heads`, got {self.kv_heads}.")
        if self.active_experts > self.experts:
            raise ValueError(f"`active_experts` ({self.active_experts}) must be at most `experts`, got {self.experts}.")
        if self.dense_layers and not (self.experts and self.dense_ffn_width):
            raise ValueError(
                f"`dense_layers` ({self.dense_layers}) are those of a mixture without one: they need `experts` and"
                f" `dense_ffn_width`, got {self.experts} and {self.dense_ffn_width}."
            )
        if self.dense_layers > self.layers:
            raise ValueError(f"`dense_layers` must be at most `layers` ({self.layers}), got {self.dense_layers}.")

    @classmethod
    def from_hugging_face(cls, config: str | Path | Mapping[str, Any]) -> "DecoderConfig":
        """Reads a ``config.json``, or its contents.

        Mixtures (Mixtral, Qwen, DeepSeek, Llama 4), shared experts and latent attention are read; biases and norms of
        single heads, less than 0.1% of the parameters, are left out where GPT-2 does not have them.

        Raises:
            ValueError: it is not the configuration of a decoder with attention and MLPs.
            OSError: the file cannot be read.

        Warns:
            UserWarning: the model type is unknown, so parts are assumed to be as in Llama.

        Example:
            >>> gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
            ...         "n_positions": 1024}
            >>> DecoderConfig.from_hugging_face(gpt2).parameters
            124439808
        """
        return cls(**decoder_fields(config if isinstance(config, Mapping) else read_config(config)))

    @classmethod
    def of_parameters(
        cls, parameters: float, *, layers: int = 0, width: int = 0, vocabulary: int = 32000, tied_head: bool = False
    ) -> "DecoderConfig":
        """A dense decoder of about that many parameters, if nothing else is known.

        Args:
            parameters: total number of parameters.
            layers: number of blocks; by default such that the width is 128 times that number, as in Llama 2 7B.
            width: width of the residual stream; pass it together with ``layers``.
            vocabulary: vocabulary size.
            tied_head: whether the output layer shares the token embedding.

        Raises:
            ValueError: the other sizes alone need more parameters.

        Example:
            >>> guess = DecoderConfig.of_parameters(7e9)
            >>> guess.layers, guess.width, guess.heads, round(guess.parameters / 1e9, 2)
            (32, 4096, 32, 7.0)
        """
        if not layers:
            counts = (*range(1, 16), *range(16, 513, 4))
            tables = (1 if tied_head else 2) * vocabulary * _HEAD_WIDTH
            layers = min(counts, key=lambda n: abs(12 * n * (n * _HEAD_WIDTH) ** 2 + n * tables - parameters))
            width = layers * _HEAD_WIDTH
        size = DecoderSize.of(int(parameters), layers=layers, width=width, vocabulary=vocabulary, tied_head=tied_head)
        heads = max(1, width // _HEAD_WIDTH)
        of_mlp = size.block_matmul_weights - 4 * width * (width // heads) * heads
        if of_mlp < 3 * width:
            raise ValueError(
                f"`parameters` ({int(parameters)}) leaves nothing for the MLPs of {layers} blocks of width {width}."
                " Check the numbers."
            )
        return cls(
            layers=layers,
            width=width,
            vocabulary=vocabulary,
            ffn_width=round(of_mlp / (3 * width)),
            tied_head=tied_head,
        )

    @property
    def attention_weights(self) -> int:
        """Weights of the matrix products of one attention: queries, keys, values and output."""
        if self.latent_attention is not None:
            return self.latent_attention.weights(self.width, self.heads)
        return self.width * self.head_width * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one MLP; in a mixture, of one expert."""
        return self._mlp_weights(self.ffn_width)

    @property
    def routed_weights(self) -> int:
        """Weights of all experts in all blocks; 0 without a mixture."""
        return (self.layers - self.dense_layers) * self.experts * self.expert_weights if self.experts else 0

    @property
    def mlp_widths(self) -> float:
        """Inner width of all MLPs that a token passes in one block; the mean over blocks that differ."""
        if not self.experts:
            return self.ffn_width
        dense = self.dense_layers / self.layers
        mixture = self.active_experts * self.ffn_width + self.shared_ffn_width
        return (1 - dense) * mixture + dense * self.dense_ffn_width

    def _mlp_weights(self, ffn_width: int) -> int:
        return (3 if self.gated else 2) * self.width * ffn_width

    @property
    def _block_vectors(self) -> int:
        norms = 2 * self.width * (2 if self.biases else 1)
        if self.latent_attention is not None:
            norms += self.latent_attention.norm_weights
        if not self.biases:
            return norms
        return norms + self.head_width * (self.heads + 2 * self.kv_heads) + self.width + self.ffn_width + self.width

    @property
    def size(self) -> DecoderSize:
        """Weights by what a parallel layout does with them; blocks that differ count as blocks of their mean."""
        mixtures = self.layers - self.dense_layers
        beside_experts = self._mlp_weights(self.shared_ffn_width) + self.width * self.experts  # and the router
        mlps = self.layers * self.expert_weights
        if self.experts:
            dense = self.dense_layers * self._mlp_weights(self.dense_ffn_width)
            mlps = self.routed_weights + mixtures * beside_experts + dense
        in_products, rest = divmod(self.layers * self.attention_weights + mlps, self.layers)
        return DecoderSize(
            layers=self.layers,
            width=self.width,
            vocabulary=self.vocabulary,
            block_matmul_weights=in_products,
            block_norm_weights=self._block_vectors,
            table_weights=self.vocabulary * self.width,
            head_weights=0 if self.tied_head else self.vocabulary * self.width,
            other_weights=self.width * (2 if self.biases else 1) + self.positions * self.width + rest,
            unrouted_weights=mixtures * max(0, self.experts - self.active_experts) * self.expert_weights,
        )

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.size.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is routed to: the N of 6 N D."""
        return self.parameters - self.size.unrouted_weights

    def saved_bytes_per_token(
        self, element_bytes: int, residual_bytes: int, *, tensor: int = 1, sequence_parallel: bool = False
    ) -> float:
        """What one block saves for backward of one token, with attention that does not keep its scores.

        Of blocks that differ it is their mean. Both norms keep their input and what they give to the products;
        attention its queries, keys, values and output; the MLP what goes in and out of its activation. Dropout keeps
        masks of one byte. With 2 bytes everywhere, 4 widths in the MLP, as many key heads as query heads, and dropout,
        this is the 34 bytes per width of Korthikanti et al. 2022.

        Args:
            element_bytes: bytes per element of inputs and outputs of products.
            residual_bytes: bytes per element of the residual stream: 4 under autocast.
            tensor: tensor-parallel ranks.
            sequence_parallel: whether norms and dropout are divided over them, too.

        Source:
            Korthikanti et al. 2022, arXiv:2205.05198, equations 2 to 4 without 5 a s / h.
        """
        whole = 2 * (residual_bytes + element_bytes) * self.width + (2 * self.width if self.dropout else 0)
        if self.latent_attention is not None:
            of_heads, of_all = self.latent_attention.saved_elements_per_token(self.heads)
            whole += element_bytes * of_all
        else:
            of_heads = 2 * self.head_width * (self.heads + self.kv_heads)
        of_heads_and_mlp = of_heads + (4 if self.gated else 2) * self.mlp_widths
        return whole / (tensor if sequence_parallel else 1) + element_bytes * of_heads_and_mlp / tensor


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
_NO_DECODERS = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"),
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
    """The arguments of a :class:`~lightning_mp.planning.DecoderConfig` that a configuration gives."""
    values: Mapping[str, Any] = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    kind = str(values.get("model_type", ""))
    _refuse_other_models(config, values, kind)
    fields: dict[str, Any] = {field: _count(values, *names) for field, names in _NAMES.items()}
    missing = [_NAMES[name][0] for name in ("layers", "width", "heads", "vocabulary") if not fields[name]]
    if missing:
        raise ValueError(
            f"The configuration does not contain {', '.join(missing)}. Pass the config.json of a decoder, or layers,"
            " width and vocabulary."
        )
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        fields["kv_heads"] = 1
    if kind and kind not in FAMILIES:
        warnings.warn(
            f"model_type {kind!r} is not known. Its MLPs are assumed to be gated and, unless the configuration says"
            " otherwise, its output layer untied: compare the number of parameters with the published one.",
            stacklevel=3,
        )
    traits = FAMILIES[kind].traits if kind in FAMILIES else frozenset[Trait]()
    learned = "positions" in traits
    return {
        **fields,
        **_mixture(values, fields),
        "latent_attention": _latent_attention(values),
        "gated": "ungated" not in traits,
        "tied_head": bool(values.get("tie_word_embeddings", config.get("tie_word_embeddings", "tied head" in traits))),
        "biases": "biases" in traits,
        "positions": _count(values, "n_positions", "max_position_embeddings") if learned else 0,
        "dropout": bool(values.get("resid_pdrop", 0.1 if kind == "gpt2" else 0)),
        "family": kind,
    }


def _refuse_other_models(config: Mapping[str, Any], values: Mapping[str, Any], kind: str) -> None:
    if config.get("is_encoder_decoder") or kind in _NO_DECODERS:
        raise ValueError(
            f"The configuration describes {kind or 'a model'}, which has an encoder; the formulas are for decoders."
            " Measure the module: estimate_memory(module, batch), or lightning-mp memory --module."
        )
    other = next((name for name in values if name.startswith(_OTHER_BLOCKS) and values[name] is not None), None)
    if other is not None:
        raise ValueError(
            f"The configuration contains {other!r}: its blocks are not attention and MLPs, which the"
            " formulas are for. Measure the module: estimate_memory(module, batch), or lightning-mp memory --module."
        )


def _count(values: Mapping[str, Any], *names: str) -> int:
    """The first that is there; 0 where none is."""
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"The configuration's {name} must be a whole number, got {value!r}.")
        return value
    return 0


def _mixture(values: Mapping[str, Any], fields: Mapping[str, int]) -> dict[str, int]:
    """Blocks of a mixture that have a dense MLP, and MLPs that every token uses beside its experts."""
    if not fields["experts"]:
        return {"ffn_width": _count(values, *_NAMES["ffn_width"][1:])}
    shared = _count(values, "shared_expert_intermediate_size")
    if not shared:
        alone = 1 if "interleave_moe_layer_step" in values else 0  # Llama 4 has one, without a field for it
        shared = (_count(values, "n_shared_experts") or alone) * fields["ffn_width"]
    dense = sum(not _is_mixture(values, block) for block in range(fields["layers"]))
    return {
        "shared_ffn_width": shared,
        "dense_layers": dense,
        "dense_ffn_width": _count(values, "intermediate_size_mlp", "intermediate_size") if dense else 0,
    }


def _is_mixture(values: Mapping[str, Any], block: int) -> bool:
    if block < _count(values, "first_k_dense_replace") or block in (values.get("mlp_only_layers") or ()):
        return False
    if values.get("moe_layers"):
        return block in values["moe_layers"]
    every_from_the_first = _count(values, "moe_layer_freq") or 1
    every_from_the_last = _count(values, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    return block % every_from_the_first == 0 and (block + 1) % every_from_the_last == 0


def _latent_attention(values: Mapping[str, Any]) -> LatentAttention | None:
    if not values.get("kv_lora_rank"):
        return None
    missing = [name for name in _LATENT if values.get(name) is None]
    if missing:
        raise ValueError(f"The configuration contains kv_lora_rank, but not {', '.join(missing)}.")
    sizes = {name: _count(values, name) for name in (*_LATENT, "q_lora_rank")}
    return LatentAttention(**sizes)
