"""Several optimizers as one: equal to stepping them by hand, through checkpoints, schedules and every precision."""

import copy
import itertools
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import at, quiet_trainer, saving
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop
from transformers import BertConfig, BertForSequenceClassification

from lightning_mp import (
    AutocastPrecision,
    JointOptimizer,
    LossScaler,
    MasterWeightsPrecision,
    OverflowMonitor,
    matrices_and_rest,
)
from lightning_mp.language_model import GPT, GPTConfig

IDS = torch.randint(10, (8, 16), generator=torch.Generator().manual_seed(0))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 10))


def loss_of(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(ids).float().flatten(0, 1), ((ids + 1) % 10).flatten())


def train(net: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(net, IDS[step % 8 : step % 8 + 1]).backward()
        for optimizer in optimizers:
            optimizer.step()


def parts_of(net: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(net)
    match kind:
        case "muon + fused adamw":
            return [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3, fused=True)]
        case "two fused":
            return [SGD(matrices, lr=0.1, momentum=0.9, fused=True), Adam(rest, lr=1e-3, fused=True)]
        case "three, groups without names":
            plain = [parameter for _, parameter in rest]
            groups = [{"params": plain[:2]}, {"params": plain[2:4], "lr": 0.5}]
            return [
                Muon([parameter for _, parameter in matrices], lr=0.02),
                SGD(groups, lr=0.1),
                RMSprop(plain[4:], lr=1e-3, foreach=True),
            ]
    raise AssertionError(kind)


KINDS = ["muon + fused adamw", "two fused", "three, groups without names"]


def assert_equal_weights(*nets: nn.Module) -> None:
    for tensors in zip(*(net.state_dict().values() for net in nets), strict=True):
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_takes_the_states_of_single_optimizers(kind: str) -> None:
    by_hand, joint = make_net(), make_net()
    parts = parts_of(by_hand, kind)
    train(by_hand, parts, range(4))
    optimizer = JointOptimizer(parts_of(joint, kind))
    joint.load_state_dict(by_hand.state_dict())
    optimizer.load_state_dict(copy.deepcopy(optimizer.joined_state_dict([part.state_dict() for part in parts])))
    train(by_hand, parts, range(4, 8))
    train(joint, [optimizer], range(4, 8))
    assert_equal_weights(by_hand, joint)
    with pytest.raises(ValueError, match=r"the states have \[\d+\] parameter groups.*Give one state for each"):
        optimizer.joined_state_dict([parts[0].state_dict()])


def test_a_single_optimizer_with_the_same_groups_resumes_as_a_joint_one() -> None:
    single, joint = make_net(), make_net()
    groups = [{"params": list(single[:2].parameters())}, {"params": list(single[2:].parameters()), "lr": 0.01}]
    adamw = AdamW(groups, lr=1e-3)
    train(single, [adamw], range(4))
    joint.load_state_dict(single.state_dict())
    optimizer = JointOptimizer([AdamW(joint[:2].parameters(), lr=1e-3), AdamW(joint[2:].parameters(), lr=0.01)])
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    train(single, [adamw], range(4, 8))
    train(joint, [optimizer], range(4, 8))
    assert_equal_weights(single, joint)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_any_groups_step_and_come_back_from_a_state_dict(sizes: list[list[int]], data: st.DataObject) -> None:
    def build() -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
        torch.manual_seed(1)
        parameters, optimizers = [], []
        for index, group_sizes in enumerate(sizes):
            groups = [{"params": [nn.Parameter(torch.randn(2)) for _ in range(size + 1)]} for size in group_sizes]
            parameters += [parameter for group in groups for parameter in group["params"]]
            optimizers.append((SGD, AdamW)[index % 2](groups, lr=0.1))
        return parameters, optimizers

    added = data.draw(st.integers(0, len(sizes) - 1))
    reference, by_hand = build()
    trained, parts = build()
    optimizer = JointOptimizer(parts)
    new = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    by_hand[added].add_param_group({"params": [new[0]], "lr": 0.3})
    optimizer.add_param_group({"params": [new[1]], "lr": 0.3, "optimizer_index": added})
    for step in range(3):
        for index, (a, b) in enumerate(zip([*reference, new[0]], [*trained, new[1]], strict=True)):
            a.grad = b.grad = None if (step + index) % 5 == 0 else torch.full((2,), float(index - 1))
        for part in by_hand:
            part.step()
        optimizer.step()
        optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert all(torch.equal(a, b) for a, b in zip([*reference, new[0]], [*trained, new[1]], strict=True))


OPTIONS = {
    SGD: {"momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1], "fused": [True, False]},
    AdamW: {"amsgrad": [True, False], "betas": [(0.9, 0.999), (0.5, 0.9)], "fused": [True, False]},
    RMSprop: {"centered": [True, False], "momentum": [0.0, 0.5], "foreach": [True, False]},
    Muon: {"nesterov": [True, False], "adjust_lr_fn": ["original", "match_rms_adamw"], "ns_steps": [2, 5]},
}


@st.composite
def partitions(draw: st.DrawFn) -> list[tuple[type, dict[str, object], list[list[str]]]]:
    """Two or three optimizers with options, and the groups of names that each takes: every parameter once."""
    shapes = {name: p.ndim for name, p in make_net().named_parameters()}
    names = draw(st.permutations(sorted(shapes)))
    first, *cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), min_size=1, max_size=2)))
    parts = []
    for start, end in itertools.pairwise([0, first, *cuts, len(names)]):
        own = names[start:end]
        takes_matrices = all(shapes[name] == 2 for name in own)
        kind = draw(st.sampled_from([kind for kind in OPTIONS if takes_matrices or kind is not Muon]))
        options = {name: draw(st.sampled_from(values)) for name, values in OPTIONS[kind].items()}
        cut = draw(st.integers(0, len(own) - 1))
        parts.append((kind, options, [group for group in (own[:cut], own[cut:]) if group]))
    return parts


def made(net: nn.Module, parts: list[tuple[type, dict[str, object], list[list[str]]]]) -> list[torch.optim.Optimizer]:
    parameters = dict(net.named_parameters())
    return [
        kind(
            [{"params": [parameters[n] for n in names], "lr": 0.01 * (i + 1)} for i, names in enumerate(groups)],
            **options,
        )
        for kind, options, groups in parts
    ]


@settings(max_examples=25, deadline=None)
@given(partitions(), st.integers(0, 3))
def test_any_partition_of_a_module_equals_the_optimizers_by_hand(parts: list[object], saved_after: int) -> None:
    """Also in a run that goes on from a state dict, from before the first step or later."""
    by_hand, joint, resumed = make_net(), make_net(), make_net()
    train(by_hand, made(by_hand, parts), range(4))
    optimizer = JointOptimizer(made(joint, parts), module=joint)
    train(joint, [optimizer], range(saved_after))
    resumed.load_state_dict(joint.state_dict())
    second = JointOptimizer(made(resumed, parts), module=resumed)
    second.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    train(joint, [optimizer], range(saved_after, 4))
    train(resumed, [second], range(saved_after, 4))
    assert_equal_weights(by_hand, joint, resumed)


def test_a_copy_shares_groups_and_state_as_the_original_does() -> None:
    net = make_net()
    optimizer = JointOptimizer(parts_of(net, KINDS[0]))
    train(net, [optimizer], range(2))
    copied = copy.deepcopy(optimizer)
    assert copied.optimizers[0].param_groups[0] is copied.param_groups[0]
    assert copied.optimizers[1].state is copied.state
    assert len(copied.state) == len(optimizer.state)


def test_hooks_of_others_see_the_joined_state() -> None:
    net = make_net()
    optimizer = JointOptimizer(parts_of(net, KINDS[0]))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": len(state["state"])})
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["mark"]))
    train(net, [optimizer], range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [9]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_parameter_in_two_optimizers_is_refused_by_name() -> None:
    net = make_net()
    for module, parameters in ((net, net[1].parameters()), (None, net[1].named_parameters(prefix="1"))):
        parameters = list(parameters)
        with pytest.raises(ValueError, match=r"1\.weight \(in optimizers 0 and 1\).*stepped twice"):
            JointOptimizer([SGD(parameters), AdamW(parameters)], module=module)


def test_a_parameter_in_no_optimizer_is_refused_by_name() -> None:
    net = make_net()
    with pytest.raises(ValueError, match=r"0\.weight, 2\.weight, 2\.bias.*would not be trained.*matrices_and_rest"):
        JointOptimizer([Muon([net[1].weight]), AdamW([net[1].bias])], module=net)


def test_the_plugins_refuse_a_parameter_in_no_optimizer() -> None:
    class Forgets(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return JointOptimizer([SGD(self.net[1].parameters(), 0.1), AdamW(self.net[3].parameters())])

    with pytest.raises(ValueError, match=r"net\.0\.weight.*would not be trained"):
        trainer(plugins=[AutocastPrecision("bf16-mixed")]).fit(Forgets(), loader())


def test_groups_and_states_of_other_optimizers_are_refused() -> None:
    net = make_net()
    optimizer = JointOptimizer(parts_of(net, KINDS[0]))
    with pytest.raises(ValueError, match=r"optimizer_index=7.*there are 2 optimizers"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "optimizer_index": 7})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("kind", ["muon", "momentum", "order"])
def test_the_state_of_another_optimizer_is_refused(kind: str) -> None:
    """AdamW's moments would be lost in silence, and its settings would be missing in the first step."""
    net = make_net()
    matrices, rest = matrices_and_rest(net)
    adamw = AdamW([{"params": matrices}, {"params": rest}])
    train(net, [adamw], range(1))
    saved = adamw.state_dict()
    other = {
        "muon": [Muon(matrices), AdamW(rest)],
        "momentum": [AdamW(matrices), SGD(rest, momentum=0.9)],
        "order": [Muon(matrices), AdamW(rest)],
    }[kind]
    if kind == "order":
        train(net, other, range(1))
        saved = JointOptimizer(other[::-1]).state_dict()
        saved["param_groups"] = [
            group | {"params": ours["params"]}
            for group, ours in zip(
                saved["param_groups"], JointOptimizer(other).state_dict()["param_groups"], strict=True
            )
        ]
    lacks = r"Muon lack .*nesterov" if kind != "momentum" else "SGD lack dampening, momentum"
    with pytest.raises(
        ValueError, match=rf"the checkpoint's groups for {lacks}.*Resume with the optimizers that saved"
    ):
        JointOptimizer(other).load_state_dict(saved)


# -- which parameters --------------------------------------------------------------------------------------------------


def test_matrices_are_hidden_ones_and_tied_heads_are_not() -> None:
    tied = make_net()
    tied.append(nn.Linear(8, 10, bias=False))
    tied[-1].weight = tied[0].weight
    tied.add_module("lm_head", nn.Linear(8, 10))
    assert [name for name, _ in matrices_and_rest(tied).matrices] == ["1.weight", "3.weight", "4.weight"]
    tied[1].weight.requires_grad_(False)
    split = matrices_and_rest(tied, matrices=["lm_head.w*"], rest=["3.*"])
    assert [name for name, _ in split.matrices] == ["4.weight", "lm_head.weight"]
    assert len(split.matrices) + len(split.rest) == sum(p.requires_grad for p in tied.parameters())


def test_what_blocks_call_output_is_hidden() -> None:
    """Attention's output in the pack's GPT, and BERT's ``layer.0.output.dense``, are hidden matrices."""
    gpt = GPT(GPTConfig(layers=2, heads=2, width=8, block_tokens=4, vocab=16))
    split = matrices_and_rest(gpt)
    assert {name.split(".", 2)[-1] for name, _ in split.matrices} == {
        "attention.query_key_value.weight",
        "attention.output.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    }
    assert len(split.matrices) == 8
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    names = {name for name, _ in matrices_and_rest(BertForSequenceClassification(config)).matrices}
    layer = "bert.encoder.layer.0."
    inner = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
    hidden = [f"{layer}{part}" for part in (*inner, "intermediate.dense", "output.dense")]
    assert names == {f"{name}.weight" for name in (*hidden, "bert.pooler.dense")}


def test_patterns_that_match_nothing_or_no_matrix_are_refused() -> None:
    net = make_net()
    with pytest.raises(ValueError, match=r"matrices=\['5\.\*'\].*matches no trainable parameter.*0\.weight"):
        matrices_and_rest(net, matrices=["5.*"])
    with pytest.raises(ValueError, match=r"1\.bias has the shape \(16,\).*takes matrices"):
        matrices_and_rest(net, matrices=["1.*"])
    with pytest.raises(ValueError, match=r"1\.weight is named in matrices and in rest"):
        matrices_and_rest(net, matrices=["1.weight"], rest=["1.*"])


# -- under Lightning ---------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, overflow_at: int = -1) -> None:
        super().__init__()
        self.net = make_net()
        self.overflow_at = overflow_at

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.net, batch[0])
        return loss * (torch.inf if self.overflow_at == self.trainer.global_step else 1.0)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = JointOptimizer(parts_of(self, KINDS[0]))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader() -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IDS), batch_size=2)


trainer = partial(quiet_trainer, max_epochs=2)

PLUGINS = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0)),
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "fp32 masters": lambda: MasterWeightsPrecision("bf16-true"),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=1024.0)),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: object) -> None:
    uninterrupted, resumed = Module(), Module()
    usual = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    saves = at(saving(f"{tmp_path}/0.ckpt"), "on_train_epoch_end", call=1)
    trainer(plugins=[PLUGINS[name]()], callbacks=[saves], **usual).fit(uninterrupted, loader())
    trainer(plugins=[PLUGINS[name]()], **usual).fit(resumed, loader(), ckpt_path=f"{tmp_path}/0.ckpt")
    assert_equal_weights(uninterrupted, resumed)
    assert not torch.equal(uninterrupted.net[1].weight.float(), make_net()[1].weight)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_skipped_step_changes_neither_weights_nor_state(name: str) -> None:
    """The step with the overflow is left out by every optimizer, and the learning rate holds (D07)."""

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.before: list[torch.Tensor] = []
            self.outcomes: list[bool] = []

        @staticmethod
        def everything(module: pl.LightningModule) -> list[torch.Tensor]:
            state = module.optimizers().optimizer.state_dict()["state"]
            values = [value for part in state.values() for value in part.values() if isinstance(value, torch.Tensor)]
            return [tensor.clone() for tensor in [*module.state_dict().values(), *values]]

        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: object) -> None:
            self.before, self.rate = self.everything(module), trainer.optimizers[0].param_groups[0]["lr"]

        def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome) -> None:
            self.outcomes.append(outcome.skipped)

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: object) -> None:
            after = self.everything(module)
            is_same = len(after) == len(self.before) and all(map(torch.equal, after, self.before))
            assert is_same == (trainer.global_step == 3)
            assert (trainer.optimizers[0].param_groups[0]["lr"] == self.rate) == (trainer.global_step in (3, 8))

    watch = Watch()
    trainer(plugins=[PLUGINS[name]()], callbacks=[OverflowMonitor(), watch]).fit(Module(overflow_at=2), loader())
    assert watch.outcomes == [step == 2 for step in range(8)]


def test_checkpoints_of_two_optimizers_resume_in_a_joint_one(tmp_path: object) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return parts_of(self, KINDS[0])

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch[0]))
            for optimizer in self.optimizers():
                optimizer.step()

    class Joint(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return JointOptimizer(parts_of(self, KINDS[0]))

    manual, joint = Manual(), Joint()
    first = trainer(plugins=[AutocastPrecision("bf16-mixed")], max_epochs=1)
    first.fit(manual, loader())
    first.save_checkpoint(f"{tmp_path}/two.ckpt")
    held = {}

    looks = at(lambda trainer, _: held.update(copy.deepcopy(trainer.optimizers[0].state_dict())), "on_train_start")
    trainer(plugins=[AutocastPrecision("bf16-mixed")], callbacks=[looks]).fit(
        joint, loader(), ckpt_path=f"{tmp_path}/two.ckpt"
    )
    states = [optimizer.state_dict()["state"] for optimizer in manual.trainer.optimizers]
    saved = [part for state in states for _, part in sorted(state.items())]
    assert len(saved) == 9
    for part, kept in zip(saved, (part for _, part in sorted(held["state"].items())), strict=True):
        assert part.keys() == kept.keys()
        assert all(torch.equal(part[key], kept[key]) for key in part)


def test_steps_the_groups_as_they_are_at_the_step() -> None:
    """Strategies split or narrow the groups for the time of one step."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    optimizer = JointOptimizer([SGD(parameters[:2], lr=1.0), SGD(parameters[2:], lr=1.0)])
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    whole = optimizer.param_groups
    optimizer.param_groups = [group | {"params": group["params"][:1]} for group in whole]
    optimizer.step()
    optimizer.param_groups = whole
    assert [parameter.item() for parameter in parameters] == [0.0, 1.0, 0.0, 1.0]
    optimizer.step()
    assert [parameter.item() for parameter in parameters] == [-1.0, 0.0, -1.0, 0.0]


def test_what_a_scaler_sets_for_a_step_is_on_the_parts_for_that_step_only():
    """A later step without a scale would divide by it, or be skipped."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    joint = JointOptimizer([AdamW([weight], fused=True)])
    joint.grad_scale, joint.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    joint.step()
    assert not any(hasattr(joint.optimizers[0], name) for name in ("grad_scale", "found_inf"))
