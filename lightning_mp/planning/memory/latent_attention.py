"""Multi-head latent attention: keys and values of all heads are made from one small vector per token."""

from dataclasses import dataclass

from lightning_mp.core.arguments import whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention, under the names of a Hugging Face configuration.

    Attributes:
        kv_lora_rank: of the vector that keys and values are made from.
        qk_nope_head_dim: of the part of a query and a key without rotary positions.
        qk_rope_head_dim: of the part with them; that of a key is the same for all heads.
        v_head_dim: of a value.
        q_lora_rank: of the vector that queries are made from; 0 makes them from the residual stream.

    Raises:
        ValueError: a number is no count.

    Source:
        DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and equations 37 to 47.

    Example:
        DeepSeek-V3 has 128 heads on a width of 7168:

        >>> attention = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ...                             q_lora_rank=1536)
        >>> attention.weights(width=7168, heads=128)
        187105280
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            minimum = 0 if name in ("q_lora_rank", "qk_rope_head_dim") else 1
            whole_number(getattr(self, name), name, "LatentAttention", minimum=minimum)

    @property
    def query_width(self) -> int:
        """Of one head's query, and of its key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def norm_weights(self) -> int:
        """Of the norms of the two small vectors."""
        return self.kv_lora_rank + self.q_lora_rank

    def weights(self, width: int, heads: int) -> int:
        """In the matrix products of one block."""
        if self.q_lora_rank:
            queries = self.q_lora_rank * (width + heads * self.query_width)
        else:
            queries = width * heads * self.query_width
        latent = width * (self.kv_lora_rank + self.qk_rope_head_dim)
        keys_and_values = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latent + keys_and_values + heads * self.v_head_dim * width

    def saved_elements_per_token(self, heads: int) -> tuple[int, int]:
        """What one block saves for backward: of all heads, and of the small vectors, which every rank has.

        Queries, keys, values and outputs of each head; each small vector before and after its norm.
        """
        return heads * 2 * (self.query_width + self.v_head_dim), 2 * self.norm_weights
