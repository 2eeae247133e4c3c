"""TokenLearningRate over whole runs: resumed, on several ranks, cooled down before their time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import schedulefree
import torch
from gloo import process_group, run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from recorded_rates import COSINE, LENGTHS, TOTAL, WSD, Recording, adamw, expected, first, fit, fused, tensor_rate
from small_models import at, shard
from torch import Tensor

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, MasterWeightsPrecision
from lightning_mp.callbacks.token_learning_rate import CooldownRequest, TokenLearningRate
from lightning_mp.training.lr_schedule.schedules import WarmupStableDecay

__all__ = ["THIRD_PARTY", "ScheduleFree", "StateInConstructor"]


class StateInConstructor(torch.optim.Optimizer):
    """SGD with momentum, whose two buffers are made in the constructor, in a list, and are a gradient behind."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["buffers"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum, before = self.state[parameter]["buffers"]
                    momentum.mul_(0.9).add_(before)
                    before.copy_(parameter.grad)
                    parameter.sub_(momentum + parameter.grad, alpha=group["lr"])
        return loss


def ScheduleFree(params: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    """SGD without a schedule, in the mode in which it trains."""
    optimizer = schedulefree.SGDScheduleFree(params, lr=lr)
    optimizer.train()
    return optimizer


THIRD_PARTY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "state in constructor": StateInConstructor,
    "lion": lion_pytorch.Lion,
    "adan": pytorch_optimizer.Adan,
    "lamb": pytorch_optimizer.Lamb,
    "schedule_free": ScheduleFree,
}


SKIPPED = (0, 3, 4, 9)


def half() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))


def cool_down_at(rate: TokenLearningRate, batch: int, **how: Any) -> Callback:
    """Calls ``cooldown_now`` in the middle of a micro-batch."""
    return at(lambda *_: rate.cooldown_now(**how), "on_before_backward", call=batch)


PLUGINS = {
    "no plugin": list,
    "stock bf16": lambda: [MixedPrecision("bf16-mixed", "cpu")],
    "bf16": lambda: [AutocastPrecision("bf16-mixed")],
    "fp16": lambda: [half()],
    "masters": lambda: [MasterWeightsPrecision("bf16-true")],
    "masters, remainder": lambda: [MasterWeightsPrecision("bf16-true", storage="remainder")],
}


class OwnAdamW(torch.optim.AdamW):
    """A step of its own, as where something is logged in it; ours cannot know that it evaluates its closure once."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", {"own AdamW": OwnAdamW} | THIRD_PARTY)
def test_every_optimizer_steps_at_the_schedules_rates(kind: str, plugin: str) -> None:
    optimizer = ({"own AdamW": OwnAdamW} | THIRD_PARTY)[kind]
    module = Recording(lambda groups: optimizer(groups, lr=1e-2))
    fit(module, [TokenLearningRate(COSINE, tokens=TOTAL)], plugins=PLUGINS[plugin]())
    rates = first(module)[:: len(module.rates) // len(LENGTHS)]  # its step calls another one, which torch counts, too
    assert rates == pytest.approx(expected(COSINE, LENGTHS), rel=1e-9)


def test_a_skipped_step_shows_the_rate_that_the_next_one_uses() -> None:
    """Unfused, so that the optimizer is not called for it."""

    rates: list[float] = []
    shows = at(lambda trainer, _: rates.append(trainer.optimizers[0].param_groups[0]["lr"]))
    fit(Recording(adamw, overflows=(7,)), [shows, TokenLearningRate(COSINE, tokens=TOTAL)], plugins=[half()])
    assert rates[6] != rates[7] == rates[8]


# -- resume ------------------------------------------------------------------------------------------------------------


def save_every_step(folder: Path) -> Callback:
    return at(lambda trainer, _: trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt"))


@pytest.mark.parametrize("optimizer", [adamw, fused, tensor_rate])
@pytest.mark.parametrize("on_waste", ["report", "extend"])
def test_a_resumed_run_uses_the_rates_of_one_that_was_not_stopped(
    on_waste: Any, optimizer: Any, tmp_path: Path
) -> None:
    """Promise 6, from every step, also right after one that was skipped."""

    def callbacks() -> list[Callback]:
        budget = ChinchillaBudget(tokens=TOTAL, on_waste=on_waste, save=False)
        return [TokenLearningRate(COSINE), budget]

    arguments: dict[str, Any] = {"max_epochs": -1}
    straight = Recording(optimizer, overflows=SKIPPED)
    trainer = fit(straight, [*callbacks(), save_every_step(tmp_path)], plugins=[half()], **arguments)
    steps = trainer.global_step
    assert steps == (16 if on_waste == "report" else 20)
    for step in (1, 3, 4, 5, 10, 15):
        resumed = Recording(optimizer, overflows=[index - step for index in SKIPPED])
        path = tmp_path / f"step={step}.ckpt"
        fit(resumed, callbacks(), plugins=[half()], ckpt_path=path, **arguments)
        assert resumed.rates == straight.rates[len(straight.rates) - len(resumed.rates) :], step
        assert len(resumed.rates) >= steps - step - len(SKIPPED)


def test_another_horizon_after_a_resume_is_followed_and_a_jump_is_warned_of(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_epochs": -1, "max_steps": 8}
    for schedule, warns in [(COSINE, True), (WSD, False)]:
        folder = tmp_path / str(warns)
        with pytest.warns(UserWarning, match="max_steps=8 ends before|the run ended after"):
            fit(
                Recording(),
                [TokenLearningRate(schedule), ChinchillaBudget(tokens=100), save_every_step(folder)],
                **arguments,
            )
        resumed = Recording()
        again = [TokenLearningRate(schedule), ChinchillaBudget(tokens=190)]
        path = folder / "step=8.ckpt"
        if warns:
            with pytest.warns(
                UserWarning, match=r"was 100 tokens and is now 190, so the learning rate jumps from 0.613 to 0.924"
            ):
                fit(resumed, again, max_epochs=-1, ckpt_path=path)
        else:
            fit(resumed, again, max_epochs=-1, ckpt_path=path)
        windows = [*LENGTHS, *LENGTHS[:13], 6]
        assert sum(windows[:30]) >= 190
        assert first(resumed)[:20] == expected(schedule, windows, 190)[8:28]


@pytest.mark.parametrize(
    ("step", "limit", "horizon", "tokens"),
    [(4, {"max_steps": 16}, 210, 26 + 12 * 10), (20, {"max_epochs": 2}, 400, 126 + 16 * 10)],
)
def test_after_a_resume_only_what_is_left_is_counted(
    step: int, limit: dict[str, int], horizon: int, tokens: int, tmp_path: Path
) -> None:
    fit(Recording(), [TokenLearningRate(COSINE, tokens=2 * TOTAL), save_every_step(tmp_path)], max_epochs=2)
    rate = TokenLearningRate(lambda _: 1.0, tokens=horizon)
    with pytest.warns(UserWarning, match=f"a run of batches like the first has about {tokens} tokens"):
        fit(Recording(), [rate], ckpt_path=tmp_path / f"step={step}.ckpt", **({"max_epochs": -1} | limit))


def test_a_jump_downwards_is_warned_of_too(tmp_path: Path) -> None:
    callbacks = [TokenLearningRate(COSINE), ChinchillaBudget(tokens=190), save_every_step(tmp_path)]
    with pytest.warns(UserWarning, match="max_steps=8 ends before|the run ended after"):
        fit(Recording(), callbacks, max_epochs=-1, max_steps=8)
    again = [TokenLearningRate(COSINE), ChinchillaBudget(tokens=100)]
    with pytest.warns(UserWarning, match=r"is now 100, so the learning rate jumps from 0.924 to 0.613"):
        fit(Recording(), again, max_epochs=-1, ckpt_path=tmp_path / "step=8.ckpt")


def test_a_checkpoint_without_counts_is_named(tmp_path: Path) -> None:
    fit(Recording(), [save_every_step(tmp_path)])
    resumed = Recording()
    with pytest.warns(UserWarning, match="no callback counted the tokens of the 8 steps before; .* begins at 0"):
        fit(resumed, [TokenLearningRate(COSINE, tokens=50)], ckpt_path=tmp_path / "step=8.ckpt")
    assert first(resumed) == expected(COSINE, LENGTHS[8:], 50)


# -- cooldown ----------------------------------------------------------------------------------------------------------


def test_a_cooldown_begins_with_the_next_step_and_ends_the_run() -> None:
    """Asked for in the 7th micro-batch; the 8th step is the first of the cooldown, over 20 tokens."""
    rate, module = TokenLearningRate(WSD, tokens=1000), Recording()
    fit(module, [rate, cool_down_at(rate, 7, tokens=20)], max_epochs=-1)
    before = sum(LENGTHS[:7])
    warm = [1e-2 * WSD(sum(LENGTHS[:i]) / 1000) for i in range(7)]
    c = WSD(before / 1000)
    falling = [sum(LENGTHS[7:i]) / 20 for i in range(7, 11)]
    assert first(module) == pytest.approx([*warm, *(1e-2 * c * (1 - u**0.5) for u in falling)], rel=1e-12)
    assert rate.is_cooling_down
    assert sum(LENGTHS[7:10]) < 20 <= sum(LENGTHS[7:11]), "the run ends with the micro-batch that reaches it"


def test_a_cooldown_that_is_asked_for_inside_of_a_window_begins_with_the_next() -> None:
    """Ranks add up their requests where a window opens: once per step, however many micro-batches it has."""
    rate, module = TokenLearningRate(WSD, tokens=1000), Recording()
    fit(module, [rate, cool_down_at(rate, 7, tokens=29)], accumulate_grad_batches=2, max_epochs=-1)
    windows = [sum(LENGTHS[i : i + 2]) for i in range(0, 12, 2)]
    before = sum(windows[:4])
    falling = [1e-2 * WSD(before / 1000) * (1 - u**0.5) for u in (0, windows[4] / 29)]
    assert windows[4] + windows[5] == 29
    assert first(module) == pytest.approx([*expected(WSD, windows[:4], 1000), *falling], rel=1e-12)


def test_a_skip_inside_of_a_cooldown_makes_the_rest_of_it_shorter() -> None:
    """Also where the horizon was given in tokens: the run ends where the cooldown was to end."""
    rate, module = TokenLearningRate(WSD, tokens=1000), Recording(adamw, overflows=(9,))
    fit(module, [rate, cool_down_at(rate, 7, tokens=40)], plugins=[half()], max_epochs=-1)
    # after 14 of 40 tokens 5 are lost: 21 are left for the rest
    way = [0, 6 / 40, 14 / 40, *(14 / 40 + 26 / 40 * tokens / 21 for tokens in (7, 16, 20))]
    falling = [1e-2 * WSD(sum(LENGTHS[:7]) / 1000) * (1 - u**0.5) for u in way]
    assert first(module)[7:] == pytest.approx(falling, rel=1e-9)


def test_a_cooldown_with_a_budget_lands_on_it_to_the_token() -> None:
    rate, module = TokenLearningRate(WSD), Recording()
    budget = ChinchillaBudget(tokens=1000)
    fit(module, [rate, budget, cool_down_at(rate, 7, tokens=22)], max_epochs=-1)
    assert budget.tokens_seen == budget.budget_tokens == sum(LENGTHS[:7]) + 22 == module.trained_tokens
    assert budget.reached


def test_another_trainer_knows_nothing_of_a_cooldown() -> None:
    rate, cooled, module = TokenLearningRate(WSD, tokens=TOTAL), Recording(), Recording()
    fit(cooled, [rate, cool_down_at(rate, 7, tokens=20)])
    fit(module, [rate])
    assert first(module) == expected(WSD, LENGTHS)
    assert not rate.is_cooling_down


def test_a_cooldown_never_passes_the_budget() -> None:
    rate, module = TokenLearningRate(WSD), Recording()
    budget = ChinchillaBudget(tokens=TOTAL)
    fit(module, [rate, budget, cool_down_at(rate, 7, tokens="1M")], max_epochs=-1)
    assert module.trained_tokens == TOTAL


def test_by_default_the_run_ends_as_if_it_had_been_planned_so() -> None:
    """WSD for 400 tokens; after 70 a cooldown over 30% of the whole, which then has 100."""
    long = WarmupStableDecay(warmup=0.025, decay=0.3)
    rate, early = TokenLearningRate(long), Recording()
    fit(early, [rate, ChinchillaBudget(tokens=400), cool_down_at(rate, 7)], [10] * 40, max_epochs=-1)
    planned = Recording()
    fit(planned, [TokenLearningRate(WarmupStableDecay(warmup=0.1, decay=0.3)), ChinchillaBudget(tokens=100)], [10] * 40)
    assert first(early) == pytest.approx(first(planned), rel=1e-9)
    assert early.trained_tokens == planned.trained_tokens == 100


@pytest.mark.parametrize("with_budget", [True, False])
def test_a_cooldown_goes_on_after_a_resume(with_budget: bool, tmp_path: Path) -> None:
    def callbacks() -> tuple[TokenLearningRate, list[Callback]]:
        rate = TokenLearningRate(WSD, tokens=None if with_budget else 1000)
        return rate, [rate, *([ChinchillaBudget(tokens=1000, save=False)] if with_budget else [])]

    arguments: dict[str, Any] = {"max_epochs": -1}
    straight, (rate, others) = Recording(fused, overflows=SKIPPED), callbacks()
    fit(straight, [*others, cool_down_at(rate, 6, tokens=40), save_every_step(tmp_path)], plugins=[half()], **arguments)
    steps = len(straight.rates)
    assert steps == 12
    for step in range(6, steps):
        resumed, (rate, others) = Recording(fused, overflows=[i - step for i in SKIPPED]), callbacks()
        fit(resumed, others, plugins=[half()], ckpt_path=tmp_path / f"step={step}.ckpt", **arguments)
        assert resumed.rates == straight.rates[step:], step
    ended, (rate, others) = Recording(fused), callbacks()
    with pytest.warns(UserWarning, match="this run has ended with its cooldown"):
        fit(ended, others, plugins=[half()], ckpt_path=tmp_path / f"step={steps}.ckpt", **arguments)
    assert ended.rates == []


def test_cooling_down_from_a_checkpoint(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_epochs": -1, "max_steps": 7}
    with pytest.warns(
        UserWarning, match="ended after 42 tokens: it is 376% longer|the run ends before its cooldown does"
    ):
        fit(Recording(), [TokenLearningRate(WSD, tokens=200), save_every_step(tmp_path)], **arguments)
    rate, module = TokenLearningRate(WSD, tokens=200), Recording()
    rate.cooldown_now(tokens=30)
    fit(module, [rate], ckpt_path=tmp_path / "step=7.ckpt", max_epochs=-1)
    u = [sum(LENGTHS[7:i]) / 30 for i in range(7, 12)]
    assert first(module) == pytest.approx([1e-2 * (1 - x**0.5) for x in u if x < 1], rel=1e-9)


def test_a_share_of_nothing_is_one_token() -> None:
    assert [CooldownRequest.tokens(0.2, trained_tokens=tokens) for tokens in (0, 1, 400)] == [1, 1, 100]


# -- several ranks -----------------------------------------------------------------------------------------------------

COUNTS = {0: [6, 3, 11, 8, 2, 9, 7], 1: [4, 10, 2, 5, 12, 3, 6]}
SUMS = [sum(pair) for pair in zip(*COUNTS.values(), strict=True)]


def ddp(**arguments: Any) -> dict[str, Any]:
    return {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo"), **arguments}


def test_ranks_use_one_rate_by_the_tokens_of_all() -> None:
    def train(rank: int) -> tuple[list[float], list[float]]:
        plain, fsdp = Recording(), Recording()
        fit(plain, [TokenLearningRate(COSINE, tokens=sum(SUMS))], COUNTS[rank], **ddp())
        plugin = [AutocastPrecision("bf16-mixed")]
        ramp = AccumulationScheduler({0: 2})
        fit(fsdp, [TokenLearningRate(COSINE, tokens=sum(SUMS)), ramp], COUNTS[rank], plugins=plugin, **ddp())
        return first(plain), first(fsdp)

    windows = [sum(SUMS[i : i + 2]) for i in range(0, 7, 2)]
    wanted = (expected(COSINE, SUMS, sum(SUMS)), expected(COSINE, windows, sum(SUMS)))
    assert run_ranks(train, 2) == [wanted, wanted]


def test_all_ranks_cool_down_when_one_is_told() -> None:
    """Promise 3. Rank 1 is told in the 2nd step; they agree in the 3rd, and the 4th is the first of the cooldown."""

    def train(rank: int) -> tuple[list[float], int | None, int]:
        rate, module = TokenLearningRate(WSD), Recording()
        budget = ChinchillaBudget(tokens=1000)
        told = [cool_down_at(rate, 2, tokens=24)] if rank == 1 else []
        fit(module, [rate, budget, *told], COUNTS[rank], max_epochs=-1, **ddp())
        return first(module), budget.budget_tokens, budget.tokens_seen

    (rates, budget, seen), other = run_ranks(train, 2)
    assert other == (rates, budget, seen)
    assert budget == seen == sum(SUMS[:3]) + 24
    start = WSD(sum(SUMS[:3]) / 1000)
    falling = [1e-2 * start * (1 - (sum(SUMS[3:i]) / 24) ** 0.5) for i in (3, 4)]
    assert rates == pytest.approx([*expected(WSD, SUMS[:3], 1000), *falling], rel=1e-9)


def test_a_request_on_its_way_between_ranks_is_saved() -> None:
    def ask(rank: int) -> list[float]:
        with process_group():
            device, request, again = torch.device("cpu"), CooldownRequest(), CooldownRequest()
            request.amount = 24.0 * rank
            first_answer = request.agree(device)
            again.load_state_dict(request.state_dict())
            return [first_answer, again.agree(device), request.agree(device), request.agree(device)]

    assert run_ranks(ask, 2) == [[0.0, 24.0, 24.0, 0.0]] * 2


@pytest.mark.parametrize("optimizer", [adamw, fused])
def test_a_cooldown_that_meets_a_skipped_step_is_shorter_by_its_tokens(optimizer: Any) -> None:
    """Whether the optimizer is called for a skipped step, as a fused one is, or not."""
    rate, module = TokenLearningRate(WSD, tokens=1000), Recording(optimizer, overflows=(7,))
    fit(module, [rate, cool_down_at(rate, 7, tokens=20)], plugins=[half()], max_epochs=-1)
    start = WSD(sum(LENGTHS[:7]) / 1000)
    falling = [1e-2 * start * (1 - (tokens / (20 - LENGTHS[7])) ** 0.5) for tokens in (0, 8, 13)]
    assert first(module)[7 + (optimizer is fused) :] == pytest.approx(falling, rel=1e-9)


def test_a_cooldown_that_waits_for_a_step_is_saved(tmp_path: Path) -> None:
    """Ranks have agreed on it, and the step that it was to begin with was skipped."""
    rate, straight = TokenLearningRate(WSD, tokens=1000), Recording(adamw, overflows=(7,))
    callbacks = [rate, cool_down_at(rate, 7, tokens=20), save_every_step(tmp_path)]
    fit(straight, callbacks, plugins=[half()], max_epochs=-1)
    resumed = Recording()
    path = tmp_path / "step=8.ckpt"
    fit(resumed, [TokenLearningRate(WSD, tokens=1000)], plugins=[half()], max_epochs=-1, ckpt_path=path)
    assert len(resumed.rates) == 3
    assert resumed.rates == straight.rates[7:]


def test_ranks_that_all_ask_get_what_each_asked_for() -> None:
    def ask(rank: int) -> float:
        with process_group():
            request = CooldownRequest()
            request.amount = 24.0
            request.agree(torch.device("cpu"))
            return request.agree(torch.device("cpu"))

    assert run_ranks(ask, 2) == [24.0, 24.0]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_sharded_optimizers_resume_at_the_same_rate(tmp_path: Path) -> None:
    """FSDP2 restores callbacks after they were set up, and writes parameter groups into a distributed checkpoint."""

    class Sharded(Recording):
        def configure_model(self) -> None:
            shard(self, self.head, self.embedding)

    def train(rank: int) -> tuple[list[float], list[float]]:
        def arguments() -> dict[str, Any]:
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
            return {"devices": 2, "strategy": strategy, "plugins": [half()]}

        def rate() -> TokenLearningRate:
            return TokenLearningRate(COSINE, tokens=sum(SUMS))

        straight, resumed = Sharded(fused), Sharded(fused)
        fit(straight, [rate(), save_every_step(tmp_path)], COUNTS[rank], **arguments())
        fit(resumed, [rate()], COUNTS[rank], ckpt_path=tmp_path / "step=4.ckpt", **arguments())
        return first(straight), first(resumed)

    wanted = expected(COSINE, SUMS, sum(SUMS))
    # torch makes the optimizer's state by a step at rate 0 before it reads the checkpoint; nobody may raise that rate
    assert run_ranks(train, 2) == [(wanted, [0.0, *wanted[4:]])] * 2


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
def test_a_window_without_a_loss_does_not_break_a_resume(tmp_path: Path) -> None:
    """Nothing is counted in it, so the last window that was stays the last one, read or not."""

    class Absent(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (5, 8) else super().training_step(batch, batch_idx)

    def plugins() -> list[Any]:
        return [AutocastPrecision("bf16-mixed")]

    straight = Absent()
    fit(straight, [TokenLearningRate(COSINE, tokens=TOTAL), save_every_step(tmp_path)], plugins=plugins())
    assert len(straight.rates) == 16
    for step in (5, 6, 8, 9):
        resumed = Absent()
        rate = TokenLearningRate(COSINE, tokens=TOTAL)
        fit(resumed, [rate], ckpt_path=tmp_path / f"step={step}.ckpt", plugins=plugins())
        assert resumed.rates == straight.rates[step:], step
