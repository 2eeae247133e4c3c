"""Wrong arguments of the pipeline: its strategy, its layers, its splits."""

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from refusing import Each, Refusal, refusals
from torch import nn

from lightning_mp import PipelineParallelStrategy
from lightning_mp.pipelining import PipelineLayer
from lightning_mp.pipelining.layers import loss_of, read_layers
from lightning_mp.pipelining.partition import named_split_points, split_model

M = MisconfigurationException


class Says(nn.Module):
    """A module with whatever layers it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))


def split(layers) -> None:
    module = Says()
    if layers is not None:
        module.pipeline_layers = lambda: layers(module)
    split_model(module, read_layers(module), [0, 1], 0)


def loss(returned) -> None:
    module = nn.Module()
    module.pipeline_loss = lambda output, batch: returned
    loss_of(module, None, None)


REFUSED = {
    PipelineParallelStrategy: [
        ({"stages": 0}, r"stages=0\): it must be a whole number, 1 or more"),
        ({"stages": True}, "=True.: it must be a whole number, 1 or more"),
        ({"microbatches": 2.0}, r"microbatches=2\.0\)"),
        ({"microbatches": True}, "=True.: it must be a whole number, 1 or more"),
        ({"find_unused_parameters": True}, r"find_unused_parameters=...\) is not known.*it takes accelerator"),
        ({"schedule": "zero bubble"}, r"schedule='zero bubble'\) is unknown; it must be one of \('1f1b', 'gpipe'\)"),
        (
            {"stages": 2, "split_points": Each([[1], 5, [None]])},
            r"PipelineParallelStrategy\(split_points=.*names of layers",
        ),
    ],
    named_split_points: [
        ((["a", "b", "c", "d"], names, 3), words)
        for names, words in [
            (["b"], "2 split points, got 1"),
            (["c", "b"], "'b' does not come after"),
            (["a", "c"], "'a' does not come after"),
            (["x", "c"], "'x' fits 0 layers"),
            (["*", "c"], r"'\*' fits 4 layers.*Layers in order: a, b, c, d"),
        ]
    ],
    split: [
        (None, "Says does not say what its layers are: pipeline_layers is None.*def pipeline_layers", M),
        (lambda m: [], "pipeline_layers is empty", M),
        (lambda m: ["c.*"], r"'c\.\*' matches no module", M),
        (lambda m: [m.a, 3], "entry 1 is 3, which is neither a module", M),
        (lambda m: [m.a, nn.ReLU()], "entry 1 uses ReLU, which is not part of the module.*attribute in __init__", M),
        (lambda m: [m.a, m.b, m.b[0]], r"b\.0 is inside of b, and both are in layers", M),
        (lambda m: [m.a], r"b\.0\.weight, b\.0\.bias are in no layer.*PipelineLayer\(function, \*modules\)", M),
    ],
    PipelineLayer: [
        (nn.ReLU(), "must be a function of .hidden, batch.; a module is a layer by itself"),
        ((lambda hidden, batch: hidden, "blocks"), "after the function come the modules"),
    ],
    loss_of: [((nn.Module(), None, None), "no loss for its pipeline.*def pipeline_loss", M)],
    loss: [
        (
            Each([None, torch.zeros(2), ({"accuracy": torch.zeros(())},), ({"loss": 1.0},)]),
            "must return a scalar tensor, or a mapping",
            M,
        )
    ],
}


@refusals(REFUSED)
def test_arguments(refusal: Refusal) -> None:
    refusal.check()
