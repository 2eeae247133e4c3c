"""Modules compute with 16-bit copies of fp32 weights: to the bit what a loop does that casts by hand, in all cases."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import lent_models
import lightning.pytorch as pl
import pytest
import torch
from lent_models import FLAT, SEQUENCES, TOKENS, Fitted, fit, mlp, same
from lightning.pytorch.plugins.precision import Precision
from master_loops import LoopByHand, clip_by_hand, counted_casts, joint, master_weights, masters_of
from small_models import loader, quiet_trainer, weights
from split_reference import away
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import lightning_mp
from lightning_mp import ActivationCheckpointing
from lightning_mp.training.precision.masters.split_parameters import SPLIT_CLASSES, SplitMemory


@contextmanager
def counted_splits() -> Iterator[Counter[int]]:
    """How often each parameter with a gradient, by its id, is split."""
    splits: Counter[int] = Counter()
    own = SplitMemory.compress

    def compress(self: SplitMemory, loans: Any, step: int) -> None:
        before = [loan.parameter for loan in self.loans if type(loan.parameter) not in SPLIT_CLASSES]
        own(self, loans, step)
        splits.update(id(p) for p in before if type(p) in SPLIT_CLASSES and p.grad is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitMemory, "compress", compress)
        yield splits


#: The other tests say how often a weight is cast to 16 bit, or compare with fp32 where a split rounds otherwise.
with_each_storage = pytest.mark.parametrize(
    "storage", ["fp32", pytest.param("remainder", marks=pytest.mark.full)], indirect=True
)
#: A test of its own where a grid is large: all pairs of the other values with this storage, too.
with_split_weights = pytest.mark.parametrize(
    "storage", [pytest.param("remainder", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture(autouse=True)
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "remainder", the loop by hand rounds as a split does, and splits are counted in place of casts."""
    if getattr(request, "param", "fp32") == "fp32":
        return

    def cast(self: LoopByHand) -> None:
        self.leaves = {p: nn.Parameter(away(p)) for _, _, p in self.places}

    monkeypatch.setattr(LoopByHand, "cast", cast)
    for module in (lent_models, request.module):
        monkeypatch.setattr(module, "master_weights", partial(master_weights, storage=request.param))
    monkeypatch.setattr(request.module, "counted_casts", counted_splits)


def fit_by_hand(module: Any, *, epochs: int = 2, window: int = 1, clip: float | None = None) -> list[Tensor]:
    loop, optimizer = LoopByHand(module), module.configure_optimizers()
    module.train()
    getattr(optimizer, "train", lambda: None)()  # of schedule-free ones
    torch.manual_seed(7)
    for _ in range(epochs):
        for index, batch in enumerate(loader(module.data)):  # draws a number in each epoch
            if index % window == 0:
                loop.cast()
            loss = loop.forward(module.training_step, batch, index)
            loop.backward(loss / window if window > 1 else loss)
            if (index + 1) % window == 0:
                loop.take_gradients()
                if clip is not None:
                    clip_by_hand(list(module.parameters()), clip, fused=bool(optimizer.defaults.get("fused")))
                optimizer.step()
                loop.clear()
            module.on_train_batch_end(None, batch, index)
    getattr(optimizer, "eval", lambda: None)()
    loop.autocast.detach()
    return weights(module)


def farthest(first: nn.Module, second: nn.Module) -> float:
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def check_against_hand(make: Callable[[], Any], *, window: int = 1, clip: float | None = None) -> None:
    """Equal, moved, and each weight cast once per window: by autocast alone numbers would often be equal, too."""
    module, start = make(), weights(make())
    with counted_casts() as casts:
        fit(module, accumulate_grad_batches=window, gradient_clip_val=clip)
    assert set(casts.values()) == {2 * len(module.data) // window}
    assert same(weights(module), fit_by_hand(make(), window=window, clip=clip))
    assert not same(weights(module), start)


# -- models ------------------------------------------------------------------------------------------------------------


class Language(Fitted):
    data = TOKENS

    def __init__(self, make_optimizer: Any) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)))
        self.make_optimizer = make_optimizer
        self.embedding, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.norm(self.net(self.embedding(batch[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Held(nn.Module):
    """Weights in lists, in dictionaries, under two names, and in a plain list that no module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8))})
        self.layer = nn.Linear(8, 8)
        self.again = self.layer.weight
        self.unseen = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = F.linear(x, weight)
        return F.linear(F.linear(self.layer(x * self.named["scale"]), self.again), self.unseen[0])


class Recomputed(nn.Module):
    def __init__(self, *, use_reentrant: bool, of_module: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU())
        self.use_reentrant, self.of_module = use_reentrant, of_module

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x * self.bias) + self.bias
        return out

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.net if self.of_module else self.inner, x, use_reentrant=self.use_reentrant)


class InFp32(nn.Module):
    """Turns autocast off, as code does that wants fp32 there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
        assert x.dtype == torch.float32
        out: Tensor = self.last(x)
        return out


def around(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), make(), nn.GELU(), nn.Linear(8, 8))


def pruned() -> nn.Module:
    net: Any = mlp()
    prune.l1_unstructured(net[0], "weight", 0.5)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 8, 2, batch_first=True),
    "gru": lambda: nn.GRU(8, 4, batch_first=True, bidirectional=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2),
    "attention": Attention,
    "held": Held,
    "weight_norm": lambda: around(lambda: parametrizations.weight_norm(nn.Linear(8, 8))),
    "spectral_norm": lambda: around(lambda: parametrizations.spectral_norm(nn.Linear(8, 8))),
    "orthogonal": lambda: around(lambda: parametrizations.orthogonal(nn.Linear(8, 8))),
    "old_spectral_norm": lambda: around(lambda: spectral_norm(nn.Linear(8, 8))),
    "old_weight_norm": lambda: around(lambda: weight_norm(nn.Linear(8, 8))),
    "pruned": pruned,
    "batch_norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(8, 8)),
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(5, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ConvTranspose1d(4, 5, 3, padding=1)
    ),
    "frozen": lambda: around(lambda: nn.Linear(8, 8).requires_grad_(False)),
    **{
        f"recomputed_{'reentrant' if reentrant else 'saved'}_{'module' if whole else 'method'}": partial(
            around, partial(Recomputed, use_reentrant=reentrant, of_module=whole)
        )
        for reentrant in (False, True)
        for whole in (False, True)
    },
}


@with_each_storage
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.filterwarnings("ignore:.*`torch.nn.utils.parametrizations.weight_norm`")
@pytest.mark.parametrize("net", NETS)
def test_modules_hold_and_use_weights_in_any_way(net: str) -> None:
    check_against_hand(lambda: Fitted(NETS[net]))


class Penalty(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.kept = (self.net[0].weight,)  # which no leaf of the loop by hand replaces

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.kept[0].square().sum()


class DoubleBackward(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + gradient.square().mean()


class Siamese(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.net(batch[0]), self.net(batch[1])
        return F.mse_loss(first, second.detach()) + F.mse_loss(second, batch[0])


class OwnWeight(Fitted):
    """Uses a weight of the LightningModule in its step, as the temperature of a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch[0]) * self.temperature.exp(), batch[1])


@with_each_storage
@pytest.mark.parametrize("kind", [Penalty, DoubleBackward, Siamese, OwnWeight])
def test_steps_use_weights_and_modules_in_any_way(kind: type[Fitted]) -> None:
    check_against_hand(kind)


def test_code_that_turns_autocast_off_computes_with_fp32_weights() -> None:
    """Inside of a module, and around one; with 16-bit gradients where the weight is lent elsewhere."""
    ends = []
    for policy in ({"*exact": "fp32", "op:losses": "fp32"}, {"op:losses": "fp32"}):
        module = Fitted(InFp32)
        fit(module, plugin=master_weights(weight_by=None, policy=policy))
        ends.append(module)
    assert farthest(*ends) < 1e-3

    class Around(Fitted):
        def out(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().out(x)

    module, fp32 = Around(), Fitted()
    fit(module)
    fit(fp32, plugin=Precision())
    assert same(weights(module), weights(fp32))


# -- optimizers --------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw_loop": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "joint": joint,
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, 1e-3)
        for name in ("NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop", "Adafactor")
    },
}


def _packaged(package: str, name: str) -> Any:
    def make(parameters: Any) -> Any:
        return getattr(pytest.importorskip(package), name)(parameters, 1e-3)

    return make


OPTIMIZERS |= {
    "lion": _packaged("lion_pytorch", "Lion"),
    "schedule_free": _packaged("schedulefree", "AdamWScheduleFree"),
    "bitsandbytes_8bit": _packaged("bitsandbytes.optim", "AdamW8bit"),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_steps_fp32_weights_with_fp32_gradients(optimizer: str, window: int, clip: float | None) -> None:
    check_against_hand(lambda: Language(OPTIMIZERS[optimizer]), window=window, clip=clip)


@with_split_weights
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_steps_split_weights_with_fp32_gradients(optimizer: str, window: int, clip: float | None) -> None:
    check_against_hand(lambda: Language(OPTIMIZERS[optimizer]), window=window, clip=clip)


@with_each_storage
@pytest.mark.parametrize("name", ["OverflowMonitor", "UnderflowMonitor", "PrecisionAudit", "OverflowPostMortem"])
def test_monitors_change_nothing(name: str) -> None:
    module = Fitted()
    fit(module, callbacks=[getattr(lightning_mp, name)()])
    assert same(weights(module), fit_by_hand(Fitted()))


@with_each_storage
def test_recomputed_modules_find_the_copies_of_their_forward() -> None:
    module = Fitted()
    fit(module, callbacks=[ActivationCheckpointing(nn.GELU)])
    assert same(weights(module), fit_by_hand(Fitted()))


# -- manual optimization, optimizers that evaluate, hooks --------------------------------------------------------------


class Manual(Fitted):
    """One step per batch, by ``how``."""

    def __init__(self, how: str = "manual_backward") -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss, parameters = self.loss(batch), list(self.parameters())
        if self.how != "window":
            optimizer.zero_grad()
        if self.how == "backward":
            loss.backward()
        elif self.how == "autograd.grad":
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        else:
            self.manual_backward(loss)
        if self.how == "climb":  # sharpness-aware, by hand
            with _climbed(parameters):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
        if self.how == "clip":
            self.clip_gradients(optimizer, 0.1, "norm")
        if self.how != "window" or batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def _climbed(parameters: list[Any]) -> Iterator[None]:
    climb = [0.05 * p.grad.float() for p in parameters]
    for parameter, step in zip(parameters, climb, strict=True):
        parameter.data.add_(step)
    yield
    for parameter, step in zip(parameters, climb, strict=True):
        parameter.data.sub_(step)


@with_each_storage
@pytest.mark.parametrize("how", ["manual_backward", "backward", "autograd.grad", "climb", "clip", "window"])
def test_manual_optimization(how: str) -> None:
    module, by_hand = Manual(how), Manual()
    fit(module, epochs=1)
    loop, optimizer = LoopByHand(by_hand), by_hand.configure_optimizers()
    for index, batch in enumerate(by_hand.data):
        if how == "window":
            if index % 3 == 0:
                loop.cast()
            loop.backward(loop.forward(by_hand.loss, batch))
            if index % 3 < 2:
                continue
            loop.take_gradients()
        else:
            loop.once(by_hand.loss, batch)
        if how == "climb":
            with _climbed(list(by_hand.parameters())):
                loop.clear()
                loop.once(by_hand.loss, batch)
        if how == "clip":
            clip_by_hand(list(by_hand.parameters()), 0.1, fused=False)
        optimizer.step()
        loop.clear()
    assert same(weights(module), weights(by_hand))


class Gan(pl.LightningModule):
    data = FLAT

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.made, self.critic = mlp(), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.made.parameters(), 1e-2), torch.optim.RMSprop(self.critic.parameters(), 1e-2)

    def losses(self, batch: Any) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        return (
            lambda: self.critic(self.made(batch[0]).detach()).mean() - self.critic(batch[1]).mean(),
            lambda: -self.critic(self.made(batch[0])).mean(),
        )

    def clamp(self) -> None:
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, loss in zip(reversed(self.optimizers()), self.losses(batch), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.clamp()


@with_each_storage
def test_a_gan_whose_critic_is_clamped_in_its_step() -> None:
    module, by_hand = Gan(), Gan()
    fit(module)
    loop, optimizers = LoopByHand(by_hand), by_hand.configure_optimizers()
    for batch in by_hand.data * 2:
        for optimizer, loss in zip(reversed(optimizers), by_hand.losses(batch), strict=True):
            loop.once(loss)
            optimizer.step()
            loop.clear()
            by_hand.clamp()
    assert same(weights(module), weights(by_hand))
    assert max(float(p.detach().abs().max()) for p in module.critic.parameters()) == torch.tensor(0.2)


class Sam(torch.optim.Optimizer):
    def __init__(self, parameters: Any, *, by_data: bool = False) -> None:
        self.inner = torch.optim.SGD(parameters, 0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups, self.by_data = self.inner.param_groups, by_data

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        climb = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
        for parameter, move in climb:
            (parameter.data if self.by_data else parameter).add_(move)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for parameter, move in climb:
            (parameter.data if self.by_data else parameter).sub_(move)
        self.inner.step()
        return loss


@with_each_storage
@pytest.mark.parametrize(
    "make",
    [Sam, partial(Sam, by_data=True), partial(torch.optim.LBFGS, lr=0.1, max_iter=4)],
    ids=["sam", "data", "lbfgs"],
)
def test_optimizers_that_evaluate_the_loss(make: Any) -> None:
    module, by_hand = Fitted(make_optimizer=make), Fitted(make_optimizer=make)
    fit(module, epochs=1)
    loop, optimizer = LoopByHand(by_hand), by_hand.configure_optimizers()
    for batch in by_hand.data:

        def evaluate(batch: Any = batch) -> Any:
            loop.clear()
            return loop.once(by_hand.training_step, batch, 0)

        if isinstance(optimizer, Sam):
            evaluate()
        optimizer.step(evaluate)
        loop.clear()
    assert same(weights(module), weights(by_hand))


@with_each_storage
def test_hooks_of_parameters_run_and_count() -> None:
    seen = set()

    class Masked(Fitted):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].weight.register_hook(lambda g: (seen.add(g.dtype), g * 0)[1])
            self.net[2].weight.register_post_accumulate_grad_hook(lambda p: seen.add(p.grad.dtype))

    module, start = Masked(), Masked()
    fit(module, epochs=1)
    assert torch.equal(module.net[0].weight, start.net[0].weight)
    assert not torch.equal(module.net[2].weight, start.net[2].weight)
    assert seen == {torch.bfloat16}


@with_each_storage
def test_functional_calls_are_cast_by_autocast() -> None:
    class Functional(Fitted):
        def out(self, x: Tensor) -> Tensor:
            out: Tensor = functional_call(self.net, dict(self.net.named_parameters()), x)
            return out

    module, plain = Functional(), Fitted()
    fit(module)
    fit(plain)
    assert same(weights(module), weights(plain))


# -- weights that other code writes ------------------------------------------------------------------------------------


class Teacher(Fitted):
    """A target network that follows, updated by ``where``."""

    def __init__(self, where: str) -> None:
        super().__init__(make_optimizer=None)
        self.where = where
        averaged = where == "AveragedModel"
        self.teacher: Any = (
            AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]
            if averaged
            else copy.deepcopy(self.net).requires_grad_(False)
        )

    @torch.no_grad()
    def update(self, *_: Any) -> None:
        if self.where == "AveragedModel":
            self.teacher.update_parameters(self.net)
            return
        for target, source in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            target.lerp_(source, 0.001)

    def forward(self, x: Tensor) -> Any:
        if self.where == "forward":
            self.update()
        return self.net(x), self.teacher(x).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training_step":
            self.update()
        out, target = self(batch[0])
        return F.mse_loss(out, batch[1]) + 0.1 * F.mse_loss(out, target)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where in ("on_train_batch_end", "AveragedModel"):
            self.update()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        if self.where == "optimizer":
            optimizer.register_step_post_hook(self.update)
        return optimizer


@with_each_storage
@pytest.mark.parametrize("where", ["on_train_batch_end", "training_step", "forward", "optimizer", "AveragedModel"])
def test_target_networks_follow(where: str) -> None:
    """In bf16 they would stand still: 0.001 of the distance is below the last bit."""
    module, by_hand, start = Teacher(where), Teacher(where), Teacher(where)
    fit(module, epochs=4)
    if where in ("forward", "training_step"):  # outside of other modules, with fp32 parameters
        update, by_hand.update = by_hand.update, lambda *_: None  # type: ignore[method-assign]
        loop, optimizer = LoopByHand(by_hand), by_hand.configure_optimizers()
        for batch in by_hand.data * 4:
            update()
            loop.once(by_hand.training_step, batch, 0)
            optimizer.step()
            loop.clear()
    else:
        fit_by_hand(by_hand, epochs=4)
    assert same(weights(module), weights(by_hand))
    assert farthest(module.teacher, start.teacher) > 1e-4


WRITES: dict[str, Callable[[Fitted], Any]] = {
    "no_grad": lambda m: torch.no_grad()(m.net[0].weight.fill_)(2.0),
    "data": lambda m: m.net[0].weight.data.fill_(2.0),
    "assigned": lambda m: setattr(m.net[0].weight, "data", torch.full((16, 8), 2.0)),
    "numpy": lambda m: m.net[0].weight.detach().numpy().fill(2.0),
    "storage": lambda m: torch.tensor([]).set_(m.net[0].weight.untyped_storage()).fill_(2.0),
    "load": lambda m: m.net[0].load_state_dict({**m.net[0].state_dict(), "weight": torch.full((16, 8), 2.0)}),
}


@with_each_storage
@pytest.mark.parametrize("how", WRITES)
def test_a_write_between_steps_counts(how: str) -> None:
    class Writes(Fitted):
        def on_train_batch_end(self, *_: Any) -> None:
            WRITES[how](self)

    module = Writes()
    fit(module)
    assert same(weights(module), fit_by_hand(Writes()))
    assert bool((module.net[0].weight == 2).all())


class Clamped(nn.Linear):
    how = "no_grad"

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "data":
                self.weight.data.clamp_(-0.2, 0.2)
            elif self.how == "assigned":
                self.weight.data = self.weight.data.clamp(-0.2, 0.2)
            else:
                self.weight.clamp_(-0.2, 0.2)
        return super().forward(input)


@with_each_storage
@pytest.mark.parametrize("how", ["no_grad", "data", "assigned"])
def test_a_weight_that_its_own_forward_writes_to_is_kept_in_fp32(how: str) -> None:
    kind = type("Clamped", (Clamped,), {"how": how})
    module, fp32 = (Fitted(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), kind(8, 8))) for _ in range(2))
    with pytest.warns(UserWarning, match="forward writes to net.2.weight. It is computed with in fp32 from now on"):
        fit(module)
    fit(fp32, plugin=Precision())
    assert farthest(module, fp32) < 5e-3
    assert {p.grad_dtype for p in module.parameters()} == {torch.float32}


# -- validation, averages, copies, failures ----------------------------------------------------------------------------


class Validated(Fitted):
    """Swaps weights in for its validation through ``.data``, which leaves no trace."""

    def __init__(self, *, swaps: bool = False) -> None:
        super().__init__()
        self.swaps, self.losses = swaps, list[float]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        if self.swaps:
            kept = [p.data.clone() for p in self.net.parameters()]
            for parameter in self.net.parameters():
                parameter.data.zero_()
            assert not self.net(batch[0]).any()
            for parameter, data in zip(self.net.parameters(), kept, strict=True):
                parameter.data.copy_(data)
            assert float(F.mse_loss(self.net(batch[0]), batch[1])) == float(loss)


def check_validation(*, swaps: bool, window: int) -> None:
    module, plain = Validated(swaps=swaps), Fitted()
    trainer = quiet_trainer(plugins=[master_weights(weight_by=None)], max_epochs=2, val_check_interval=1)
    trainer.accumulate_grad_batches = window
    trainer.fit(module, loader(SEQUENCES), loader(SEQUENCES[:2]))
    fit(plain, accumulate_grad_batches=window)
    assert same(weights(module), weights(plain))
    assert len(set(module.losses)) > 2 * 2 * 6 // window - 2


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("swaps", [False, True])
def test_a_validation_changes_nothing(swaps: bool, window: int) -> None:
    check_validation(swaps=swaps, window=window)


@with_split_weights
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("swaps", [False, True])
def test_a_validation_of_split_weights_changes_nothing(swaps: bool, window: int) -> None:
    check_validation(swaps=swaps, window=window)


@with_each_storage
def test_after_a_fit_nothing_is_left() -> None:
    module = Fitted()
    before = list(module.parameters())
    trainer = fit(module)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert {p.dtype for p in module.parameters()} == {p.grad_dtype for p in module.parameters()} == {torch.float32}
    assert module.net(torch.randn(2, 8)).dtype == torch.float32
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert all(torch.equal(a, b) for a, b in zip(masters_of(trainer), module.parameters(), strict=True))
    again = copy.deepcopy(module)
    fit(module)
    fit(again)
    assert same(weights(module), weights(again))


@with_each_storage
def test_an_exception_in_a_forward_leaves_the_parameters() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(str(self.layer.weight.dtype))

    module = Fitted(Breaks)
    with pytest.raises(KeyError, match="torch.bfloat16"):
        fit(module)
    assert type(module.net.layer.weight) is nn.Parameter
    assert module.net.layer.weight.dtype == torch.float32


def test_a_layer_that_is_unfrozen_trains_and_is_cast_once_per_window_from_then_on() -> None:
    class Unfreezes(Fitted):
        def on_train_epoch_start(self) -> None:
            for parameter in self.net[0].parameters():
                parameter.requires_grad_(self.current_epoch > 0)

        def configure_optimizers(self) -> Any:
            return self.make_optimizer(self.parameters())

    module, start = Unfreezes(), Unfreezes()
    with counted_casts() as casts:
        fit(module)
    assert not torch.equal(module.net[0].weight, start.net[0].weight)
    assert casts[id(module.net[0].weight)] == 6
    assert casts[id(module.net[2].weight)] == 12


@with_each_storage
def test_weights_loaded_in_16_bit_are_widened_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    module, by_hand = Fitted().bfloat16(), Fitted().bfloat16().float()
    with caplog.at_level("INFO"):
        fit(module)
    assert same(weights(module), fit_by_hand(by_hand))
    assert (
        caplog.text.count("4 trainable weights were loaded in 16 bit (net.0.weight, net.0.bias, net.2.weight and 1")
        == 1
    )


class Late(Fitted):
    """Compiles a part in one of the hooks of a fit."""

    def __init__(self, hook: str, what: str) -> None:
        super().__init__()
        self.hook, self.what = hook, what

    def make(self, hook: str) -> None:
        if hook != self.hook:
            return
        if self.what == "in place":
            self.net.compile(backend="eager")
        elif self.what == "as a wrapper":
            self.net = torch.compile(self.net, backend="eager")
        else:
            self.net[0] = torch.compile(self.net[0], backend="eager")

    def setup(self, stage: str) -> None:
        self.make("setup")

    def on_train_start(self) -> None:
        self.make("on_train_start")


@pytest.mark.parametrize("hook", ["setup", "on_train_start"])
@pytest.mark.parametrize("what", ["in place", "as a wrapper", "inside"])
def test_what_is_compiled_too_late_for_copies_is_named(what: str, hook: str) -> None:
    torch._dynamo.reset()
    module, is_late = Late(hook, what), hook == "on_train_start" and what != "inside"
    dtypes: set[torch.dtype] = set()
    module.on_after_backward = lambda: dtypes.update(p.grad.dtype for p in module.parameters())  # type: ignore[method-assign]
    words = r"'net' was compiled after set-up and gets no 16-bit copies"
    with pytest.warns(UserWarning, match=words) if is_late else nullcontext():
        fit(module, epochs=1)
    assert dtypes == {torch.float32 if is_late else torch.bfloat16}


@with_each_storage
def test_a_weight_that_is_changed_inside_of_a_step_is_cast_again() -> None:
    """The same window, with no optimizer step between the two calls."""

    class Zeroed(Fitted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                before = self.net(batch[0])
                self.net[0].weight.zero_()
                changed = self.net(batch[0])
            assert not torch.equal(before, changed)
            assert torch.equal(changed, changed[:1].expand_as(changed))
            return self.net(batch[0]).square().mean()

    fit(Zeroed(), epochs=1)
