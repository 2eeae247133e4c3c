"""Modules of the meta device come to life once, with the same numbers on all ranks."""

from typing import Any

import torch
from gloo import process_group, run_ranks
from torch import nn

from lightning_mp.training.distributed.materialize import materialise


def test_what_comes_to_life_stays_frozen_has_its_buffers_and_may_lie_in_any_order() -> None:
    def run(rank: int) -> Any:
        with process_group():
            norm, turned = nn.BatchNorm1d(3, device="meta"), nn.Linear(4, 3)
            norm.weight.requires_grad_(False)
            turned.weight = nn.Parameter(torch.full((4, 3), float(rank)).t())
            materialise([norm, turned], torch.device("cpu"))
            trainable = [parameter.requires_grad for parameter in norm.parameters()]
            # NCCL sends nothing that is not contiguous.
            sent = turned.weight.abs().sum().item(), turned.weight.is_contiguous()
            return trainable, norm.running_var.tolist(), sent

    assert run_ranks(run, 2) == [([False, True], [1.0] * 3, (0.0, True))] * 2
