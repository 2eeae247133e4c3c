"""PipelineParallelStrategy: parameter groups that are added during the run are trained and saved as in one process."""

import pytest
import torch
from gloo import run_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedMLP, fit
from torch import nn

from lightning_mp import PipelineParallelStrategy, UnderflowMonitor
from lightning_mp.pipelining.checkpoints import OptimizerParts, with_added_groups

# One process goes on without the callback.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create")

#: Two stages have layers 0 and 1, and 2 to 4.
BODIES = {"first stage": (0, 1), "last stage": (4,), "both stages": (1, 2), "backwards": (3, 0)}


class Finetunes(BaseFinetuning):
    """Some layers are trained from the second epoch on."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.layers[n] for n in self.body])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.layers[n] for n in sorted(self.body)], optimizer, lr=5e-3)


class AddsLater(Callback):
    """The same in the middle of the first epoch."""

    def __init__(self, body):
        self.body = body

    def setup(self, trainer, pl_module, stage):
        self.parameters = [p for n in self.body for p in pl_module.layers[n].parameters()]
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            for parameter in self.parameters:
                parameter.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(self.parameters), "lr": 5e-3})


class Finetuned(PipelinedMLP):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class MakesBoth(PipelinedMLP):
    """For the run that goes on."""

    body: tuple[int, ...] = ()

    def configure_optimizers(self):
        added = [p for n in self.body for p in self.layers[n].parameters()]
        first = [p for n, layer in enumerate(self.layers) if n not in self.body for p in layer.parameters()]
        optimizer = torch.optim.AdamW([{"params": first}, {"params": added, "lr": 5e-3}], lr=1e-2)
        for parameter in added:
            parameter.requires_grad_(True)
        return optimizer


def leg(module, stages, path, callback, **arguments):
    strategy = PipelineParallelStrategy(microbatches=4) if stages > 1 else "auto"
    arguments |= {"callbacks": [callback, UnderflowMonitor()], "use_distributed_sampler": False}
    trainer = fit(module, strategy, stages, **arguments)
    groups = [(group["lr"], len(group["params"])) for group in trainer.optimizers[0].param_groups]
    trainer.save_checkpoint(path)
    return module.train_losses, groups


def loaded(path):
    return torch.load(path, weights_only=False)


def assert_close(ours, theirs, **tolerance):
    (ours_state,), (theirs_state,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert ours_state["param_groups"] == theirs_state["param_groups"]
    assert ours_state["state"].keys() == theirs_state["state"].keys()
    pairs = [(ours["state_dict"], theirs["state_dict"])]
    pairs += [(ours_state["state"][number], state) for number, state in theirs_state["state"].items()]
    for one, other in pairs:
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, **tolerance)


@pytest.mark.full
@pytest.mark.parametrize("where", ["first stage", "last stage", "both stages"])
def test_a_group_that_was_added_goes_on_as_in_one_process(where, tmp_path):
    body = BODIES[where]

    def one(rank):
        leg(Finetuned(), 1, tmp_path / "one.ckpt", Finetunes(body), max_epochs=3)

    def two(rank):
        found = leg(Finetuned(), 2, tmp_path / "two.ckpt", Finetunes(body), max_epochs=3)
        leg(Finetuned(), 2, tmp_path / "half.ckpt", Finetunes(body), max_epochs=2)
        return found[1]

    def resume(rank, stages):
        module = MakesBoth()
        module.body = body
        path = tmp_path / f"resumed {stages}.ckpt"
        # In one process Lightning's callback would make the groups that it saw on the first stage.
        callback = Finetunes(body) if stages > 1 else Callback()
        leg(module, stages, path, callback, max_epochs=3, ckpt_path=str(tmp_path / "half.ckpt"))

    def refused(rank):
        groups = rf"groups of \[{10 - 2 * len(body)}, {2 * len(body)}\] .* of \[{10 - 2 * len(body)}\]"
        with pytest.raises(ValueError, match=rf"{groups}.*BackboneFinetuning, must be made in configure_optimizers"):
            leg(Finetuned(), 2, "-", Finetunes(body), max_epochs=3, ckpt_path=str(tmp_path / "half.ckpt"))

    run_ranks(one, 1)
    of_stages = run_ranks(two, 2)
    assert [[rate for rate, _ in groups] for groups in of_stages] == [[1e-2, 5e-3]] * 2
    assert [sum(sizes) for sizes in zip(*([n for _, n in groups] for groups in of_stages), strict=True)] == [
        10 - 2 * len(body),
        2 * len(body),
    ]
    assert_close(loaded(tmp_path / "two.ckpt"), loaded(tmp_path / "one.ckpt"), rtol=1e-3, atol=1e-6)
    run_ranks(refused, 2)
    for stages in (2, 1, 3) if where == "both stages" else (2, 1):
        run_ranks(lambda rank, n=stages: resume(rank, n), stages)
        exact = {"rtol": 0, "atol": 0} if stages == 2 else {"rtol": 1e-3, "atol": 1e-6}
        assert_close(loaded(tmp_path / f"resumed {stages}.ckpt"), loaded(tmp_path / "two.ckpt"), **exact)


class Anew(Callback):
    """Another optimizer inside of the fit, over what is on this stage."""

    def __init__(self, way, epoch, batch):
        self.way, self.when = way, (epoch, batch)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) != self.when:
            return
        if self.way == "set-up":
            trainer.strategy.setup_optimizers(trainer)
        else:
            trainer.optimizers = [torch.optim.AdamW(pl_module.parameters(), lr=1e-2)]


@pytest.mark.full
@pytest.mark.parametrize("way", ["set-up", "assigned"])
@pytest.mark.parametrize("when", [(1, 0), (1, 1)], ids=["start of an epoch", "inside of an epoch"])
def test_an_optimizer_that_was_made_anew_is_saved_as_in_one_process(way, when, tmp_path):
    """Rank 0 saved the moments of its own stage, as if they were those of the first parameters."""

    def run(rank, stages, path, **arguments):
        leg(Finetuned(), stages, path, Anew(way, *when), **arguments)

    run_ranks(lambda rank: run(rank, 1, tmp_path / "one.ckpt", max_epochs=2), 1)
    run_ranks(lambda rank: run(rank, 2, tmp_path / "two.ckpt", max_epochs=2), 2)
    assert_close(loaded(tmp_path / "two.ckpt"), loaded(tmp_path / "one.ckpt"), rtol=1e-3, atol=1e-6)
    for stages in (1, 2):
        half = {"max_epochs": 3, "ckpt_path": str(tmp_path / "two.ckpt")}
        run_ranks(lambda rank, n=stages, h=half: run(rank, n, tmp_path / f"on {n}.ckpt", **h), stages)
    assert_close(loaded(tmp_path / "on 2.ckpt"), loaded(tmp_path / "on 1.ckpt"), rtol=1e-3, atol=1e-6)


@pytest.mark.full
def test_a_group_of_parameters_from_before_the_split_keeps_their_order(tmp_path):
    """Added in the middle of an epoch, with the parameters of all stages: each keeps its own, numbers stay."""
    body = BODIES["backwards"]

    def run(rank, stages):
        return leg(Finetuned(), stages, tmp_path / f"{stages}.ckpt", AddsLater(body), max_epochs=2)[1]

    run_ranks(lambda rank: run(rank, 1), 1)
    assert run_ranks(lambda rank: run(rank, 2), 2) == [[(1e-2, 2), (5e-3, 2)], [(1e-2, 4), (5e-3, 2)]]
    assert_close(loaded(tmp_path / "2.ckpt"), loaded(tmp_path / "1.ckpt"), rtol=1e-3, atol=1e-6)


def test_groups_that_do_not_belong_together_are_refused_on_all_stages():
    def run(rank):
        weights = [nn.Parameter(torch.zeros(1)) for _ in "abcd"]
        name_of = {id(p): name for p, name in zip(weights, "abcd", strict=True)}
        first, second = weights[2 * rank : 2 * rank + 2]

        def stage(*added, lost=False):
            optimizer = torch.optim.SGD([first], lr=0.1)
            for parameter in added:
                optimizer.add_param_group({"params": [parameter]})
            if lost:
                optimizer.param_groups[0]["params"].clear()
            parts = OptimizerParts(groups=((0, 1),), names=("a", "c"), numbers=(rank,), name_of=name_of)
            return with_added_groups(parts, optimizer, [first, second], "abcd"), optimizer

        unchanged, _ = stage()
        assert unchanged.names == ("a", "c")
        parts, optimizer = stage(*([second] if rank else []))
        assert (parts.names, parts.numbers) == (("a", "c", "d"), ((0,), (1, 2))[rank])
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, rank]
        with pytest.raises(MisconfigurationException, match="1 or 2 parameter groups were added to SGD, depending on"):
            stage(second, *([weights[0]] if rank else []))
        with pytest.raises(MisconfigurationException, match=r"not part of the LightningModule were .* SGD: \(3, 5\)\."):
            stage(*([nn.Parameter(torch.zeros(3, 5))] if rank else []))
        with pytest.raises(
            MisconfigurationException, match="group 0 of SGD has got, or lost, .* Make all groups in con"
        ):
            stage(lost=rank == 0)

    run_group(run, 2)
