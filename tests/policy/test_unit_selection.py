"""Which modules become sharding units: pure resolution, no process."""

from typing import Any

import pytest
from fsdp2_runs import model
from torch import nn

from lightning_mp.language_model.gpt import Block
from lightning_mp.training.policy.unit_selection import (
    read_shard,
    repeated_blocks,
    tied_parameters,
    unit_names,
    units_by_size,
)

BLOCKS = ["model.blocks.0", "model.blocks.1"]


@pytest.mark.parametrize(
    "shard", [Block, {Block}, [Block], "Block", "lightning_mp.language_model.gpt.Block", "model.blocks.*", "auto", 3000]
)
def test_every_way_to_name_the_blocks(shard: Any) -> None:
    assert unit_names(model(), read_shard(shard)) == BLOCKS


def test_sizes_count_what_is_in_no_unit_inside() -> None:
    assert units_by_size(model(), 2000) == ["model", "model.blocks.0.mlp", "model.blocks.1.mlp"]
    assert units_by_size(model(), 1000) == [
        f"{name}.{part}" for name in BLOCKS for part in ("attention", "mlp.up", "mlp.down")
    ]


def test_blocks_that_share_weights_with_the_rest_are_no_units() -> None:
    shared = nn.Linear(4, 4)
    tied = nn.ModuleDict({"blocks": nn.ModuleList([shared, nn.Linear(4, 4)]), "again": shared})
    assert repeated_blocks(tied) == ["blocks.0", "blocks.1"]  # one module under two names: all of it is inside
    tied["other"] = nn.Linear(4, 4)
    tied["other"].weight = tied["blocks"][1].weight
    assert "blocks.1" not in repeated_blocks(tied)
    assert ["blocks.1.weight", "other.weight"] in tied_parameters(tied)
    part = nn.Linear(4, 4)  # of two blocks: gathered by the one, used by the other
    blocks = nn.ModuleList([nn.Sequential(part, nn.Linear(4, 4)), nn.Sequential(part)])
    assert repeated_blocks(nn.ModuleDict({"blocks": blocks})) == []


def test_experts_inside_of_blocks_stay_in_them() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))

    assert repeated_blocks(nn.ModuleDict({"layers": nn.ModuleList([block(), block()])})) == ["layers.0", "layers.1"]


def test_lists_in_a_list_are_no_units_but_what_they_hold_is() -> None:
    """As the levels of a U-Net; FSDP2 refuses modules without a forward."""
    downs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Identity()]) for _ in range(2))
    assert repeated_blocks(nn.ModuleDict({"downs": downs})) == ["downs.0.0", "downs.0.1", "downs.1.0", "downs.1.1"]
    levels = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Tanh()}) for _ in range(2))
    assert repeated_blocks(levels) == []


def test_the_tenth_block_is_not_inside_of_the_first() -> None:
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(11))
    blocks[10].weight = blocks[1].weight
    assert repeated_blocks(nn.ModuleDict({"blocks": blocks})) == [f"blocks.{i}" for i in range(10) if i != 1]
    with pytest.raises(ValueError, match=r"blocks\.1\.weight and blocks\.10\.weight are one parameter"):
        unit_names(nn.ModuleDict({"blocks": blocks}), ("blocks.1",))


def test_half_of_a_tie_is_no_unit_of_that_size_and_layers_without_weights_are_none_at_all() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    assert units_by_size(model, 20) == ["1"]
    assert repeated_blocks(nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)])) == ["2", "3"]
