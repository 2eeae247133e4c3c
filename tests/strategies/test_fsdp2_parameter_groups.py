"""FSDP2Strategy: parameter groups of a checkpoint come back with their settings and moments, or are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_runs import fsdp2, full_weights
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import BaseFinetuning
from small_models import Regression, ResumableLoader, quiet_trainer, regression_batches
from torch.distributed.tensor import DTensor

from lightning_mp import MasterWeightsPrecision

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

Groups = Callable[[Regression], list[dict[str, Any]]]
KINDS = ("shards", "one file")


def head(module: Regression) -> dict[str, Any]:
    return {"params": list(module.net[2].parameters())}


def body(module: Regression) -> dict[str, Any]:
    return {"params": list(module.net[0].parameters()), "lr": 5e-3, "weight_decay": 0.1}


def body_from_the_end(module: Regression) -> dict[str, Any]:
    return {**body(module), "params": list(module.net[0].parameters())[::-1]}


GROUPS: dict[str, Groups] = {
    "head": lambda module: [head(module)],
    "head, body": lambda module: [head(module), body(module)],
    "body, head": lambda module: [body_from_the_end(module), head(module)],
    "together": lambda module: [{"params": list(module.parameters())}],
    "weights, biases": lambda module: (
        [{"params": [layer.weight, layer.bias]} for layer in (module.net[2],)]
        + [{"params": [module.net[0].weight]}, {"params": [module.net[0].bias]}]
    ),
    "head and a bias, rest": lambda module: [
        {"params": [module.net[2].weight, module.net[0].bias]},
        {"params": [module.net[2].bias, module.net[0].weight]},
    ],
}


class Grouped(Regression):
    def __init__(self, groups: str, optimizer: Any = torch.optim.AdamW, scheduler: Any = None, **options: Any) -> None:
        super().__init__(scheduler=scheduler)
        self.make_optimizer = lambda _: optimizer(GROUPS[groups](self), **{"lr": 1e-2, **options})


class Loaded:
    """What the optimizers hold when training starts: of each parameter its group's settings, and its whole state."""

    def __init__(self, module: Regression) -> None:
        self.optimizers: list[dict[str, Any]] = []
        module.on_train_start = lambda: self.look(module)  # type: ignore[method-assign]

    def look(self, module: Regression) -> None:
        names = {p: name for name, p in module.named_parameters()}
        for optimizer in module.trainer.optimizers:
            held = {}
            for group in optimizer.param_groups:
                settings = {key: value for key, value in group.items() if key != "params"}
                for p in group["params"]:
                    state = {key: whole(value) for key, value in optimizer.state.get(p, {}).items()}
                    held[names[p]] = (settings, state)
            self.optimizers.append(held)


def whole(value: Any) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def leg(
    module: Regression, steps: int, *, strategy: Any = None, ckpt_path: Any = None, save_to: Any = None, **others: Any
) -> Any:
    """Settings and states at the start, and weights at the end."""
    loaded = Loaded(module)
    trainer = quiet_trainer(strategy=strategy or "auto", max_steps=steps, max_epochs=-1, **others)
    trainer.fit(module, ResumableLoader(regression_batches(4)), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return loaded.optimizers, full_weights(module)


def sharded(kind: str, **arguments: Any) -> Any:
    return fsdp2("net.*", save_distributed_checkpoint=kind == "shards", **arguments)


def assert_same_weights(ours: dict[str, Any], theirs: dict[str, Any], rtol: float = 0.0, atol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol, msg=name)


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 100)


def named_groups(groups: list[dict[str, Any]], **options: Any) -> Any:
    return torch.optim.AdamW([{**group, "name": f"group {n}"} for n, group in enumerate(groups)], **options)


def sgd_of(momentum: float) -> Any:
    return lambda groups, **options: torch.optim.SGD(groups, **options, momentum=momentum)


#: Of the first run, of the one that goes on, and a setting of head and body that it has then from a folder.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[Any]]] = {
    "a scheduler more": ({}, {"scheduler": step_lr}, "initial_lr", [1e-2, 5e-3]),
    "momentum less": ({"optimizer": sgd_of(0.9)}, {"optimizer": sgd_of(0.0)}, "momentum", [0.9, 0.9]),
    "a scheduler less": ({"scheduler": step_lr}, {}, "initial_lr", [1e-2, 5e-3]),
    "a name more": ({}, {"optimizer": named_groups}, "name", ["group 0", "group 1"]),
    "a name less": ({"optimizer": named_groups}, {}, "name", ["group 0", "group 1"]),
    "another rate": ({}, {"lr": 1.0}, "lr", [1e-2, 5e-3]),
}


@pytest.mark.full
def test_settings_of_groups_come_back_as_from_a_single_file(tmp_path: Path) -> None:
    """All that was saved, also what the new run does not know; what was not saved stays as the new run has it."""

    def run(kind: str, name: str) -> Any:
        then, now, *_ = SETTINGS[name]
        path = tmp_path / f"{name} {kind}.ckpt"
        _, before = leg(Grouped("head, body", **then), 2, strategy=sharded(kind), devices=2, save_to=path)
        loaded, after = leg(Grouped("head, body", **now), 4, strategy=sharded(kind), devices=2, ckpt_path=path)
        assert not torch.equal(before["net.0.weight"], after["net.0.weight"])
        return loaded, after

    for found in run_ranks(lambda rank: {(kind, name): run(kind, name) for kind in KINDS for name in SETTINGS}, 2):
        for name in SETTINGS:
            ([of_folder], weights), ([of_file], wanted) = (found[kind, name] for kind in KINDS)
            for parameter, (settings, state) in of_file.items():
                ours, our_state = of_folder[parameter]
                assert {key: ours[key] for key in settings} == settings, name
                assert our_state.keys() == state.keys()
                assert all(torch.equal(our_state[key], value) for key, value in state.items()), (name, parameter)
            assert_same_weights(weights, wanted)
            *_, setting, values = SETTINGS[name]
            assert [of_folder[f"net.{n}.weight"][0][setting] for n in (2, 0)] == values


# -- which groups ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, {}), (2, {})), ((2, {}), (1, {})), ((4, {"replicate_size": 2}), (2, {}))],
    ids=["2 ranks", "2 to 1", "hybrid to 2"],
)
def test_groups_in_another_order_go_on_with_what_they_have(before: Any, after: Any, tmp_path: Path) -> None:
    """A folder names the parameters; the straight run is one process with the first order."""
    path = tmp_path / "a.ckpt"

    def run(ranks: int, arguments: Any, groups: str, steps: int, **others: Any) -> Any:
        return run_ranks(
            lambda rank: leg(Grouped(groups), steps, strategy=sharded("shards", **arguments), devices=ranks, **others),
            ranks,
        )

    run(*before, "head, body", 2, save_to=path)
    _, straight = leg(Grouped("head, body"), 4)
    for [held], weights in run(*after, "body, head", 4, ckpt_path=path):
        assert held["net.0.weight"][0]["lr"] == 5e-3
        assert held["net.2.weight"][0]["lr"] == 1e-2
        assert all(state["step"] == 2 for _, state in held.values())
        assert_same_weights(weights, straight, rtol=1e-4, atol=1e-5)


REFUSED = {
    ("head, body", "head"): r"groups of \[2, 2\] .* made groups of \[2\]: net\.0\.bias, net\.0\.weight are only in the"
    r" checkpoint's\. Resume with the model .* made in configure_optimizers",
    (
        "head",
        "head, body",
    ): r"groups of \[2\] .* made groups of \[2, 2\]: net\.0\.bias, net\.0\.weight are only in those"
    r" of configure_optimizers\. Resume with the model",
    ("head, body", "together"): r"of \[2, 2\] .* of \[4\]: the same parameters are divided among them in another way\.",
    ("head, body", "head and a bias, rest"): r"of \[2, 2\] .* of \[2, 2\]: the same parameters are divided among them",
}


@pytest.mark.full
@on_ranks(run_ranks, 2)
def test_other_groups_are_refused_before_anything_is_loaded_into_the_optimizer(rank: int, tmp_path: Path) -> None:
    for groups in {saved for saved, _ in REFUSED}:
        leg(Grouped(groups), 2, strategy=sharded("shards"), devices=2, save_to=tmp_path / groups)
    for (saved, own), message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            leg(Grouped(own), 4, strategy=sharded("shards"), devices=2, ckpt_path=tmp_path / saved)


class TwoOptimizers(Grouped):
    def __init__(self) -> None:
        super().__init__("head")
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (self.net[0], self.net[2])]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.full)])
@on_ranks(run_ranks, 2)
def test_another_number_of_optimizers_is_refused_in_both_directions(rank: int, kind: str, tmp_path: Path) -> None:
    paths = {number: tmp_path / f"{kind} {number}" for number in (1, 2)}
    for number, module in ((1, Grouped("together")), (2, TwoOptimizers())):
        leg(module, 2, strategy=sharded(kind), devices=2, save_to=paths[number])
    with pytest.raises(ValueError, match="holds the state of 2 optimizers, and configure_optimizers made 1"):
        leg(Grouped("together"), 4, strategy=sharded(kind), devices=2, ckpt_path=paths[2])
    with pytest.raises(ValueError, match="holds the state of 1 optimizers, and configure_optimizers made 2"):
        leg(TwoOptimizers(), 4, strategy=sharded(kind), devices=2, ckpt_path=paths[1])


class Unfreezes(BaseFinetuning):
    """The body is trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plugin", [lambda: None, lambda: MasterWeightsPrecision("bf16-true")], ids=["fp32", "masters"])
@pytest.mark.full
def test_a_group_that_was_added_during_the_run_is_refused_or_made_again(plugin: Any, kind: str, tmp_path: Path) -> None:
    """Its moments come back also where its parameters are frozen while they are loaded."""

    class MakesBoth(Grouped):
        unfreezes = True

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW([head(self), {"params": list(self.net[0].parameters()), "lr": 5e-3}], lr=1e-2)
            if self.unfreezes:
                self.net[0].requires_grad_(True)
            return optimizer

    class StaysFrozen(MakesBoth):
        unfreezes = False

    def run(rank: int) -> Any:
        def go(make: Any, steps: int, **others: Any) -> Any:
            plugins = [made] if (made := plugin()) is not None else []
            return leg(
                make("head"),
                steps,
                strategy=sharded(kind),
                devices=2,
                callbacks=[Unfreezes()],
                plugins=plugins,
                **others,
            )

        path = tmp_path / "a.ckpt"
        go(Grouped, 6, save_to=path)
        _, straight = go(Grouped, 8)
        with pytest.raises(
            ValueError, match=r"groups of \[2, 2\] .* groups of \[2\].*as by BackboneFinetuning, must be made"
        ):
            go(Grouped, 8, ckpt_path=path)
        [held], resumed = go(MakesBoth, 8, ckpt_path=path)
        [frozen], _ = go(StaysFrozen, 8, ckpt_path=path)
        return straight, resumed, held, frozen

    for straight, resumed, held, frozen in run_ranks(run, 2):
        assert_same_weights(resumed, straight)
        assert [held[f"net.{n}.weight"][1]["step"] for n in (0, 2)] == [2, 6]
        for name, (_, state) in held.items():
            assert state.keys() == frozen[name][1].keys()
            assert all(torch.equal(frozen[name][1][key], value) for key, value in state.items())
