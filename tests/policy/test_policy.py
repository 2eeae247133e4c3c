"""Policies in training and evaluation under AutocastPrecision: what runs in which dtype, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from policy_models import LOW, RULES, WIDTH, Classifier, Evaluated, batches, failing, nothing_is_left, train
from small_models import fit, loader, quiet_trainer, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, PrecisionPolicy
from lightning_mp.training.policy.applied import AppliedPolicy


def test_stock_autocast_runs_softmax_and_norms_in_16_bit_on_the_cpu():
    assert train(None).dtypes == dict.fromkeys(["logits", "softmax", "layer_norm", "linear"], LOW) | {
        "loss": torch.float32
    }


def test_default_runs_what_a_model_calls_itself_in_fp32():
    fp32 = dict.fromkeys(["softmax", "layer_norm", "loss"], torch.float32)
    assert train(PrecisionPolicy.default()).dtypes == {"logits": LOW, "linear": LOW} | fp32


def test_training_under_default_equals_casts_written_by_hand():
    class ByHand(Classifier):
        def step(self, batch: Any) -> Tensor:
            x, y = batch
            x, body = self.stem(x), self.body
            x = x + body.down(F.gelu(body.up(x)))
            with torch.autocast("cpu", enabled=False):
                x = F.layer_norm(x.float(), (WIDTH,), body.gain)
            scores = x @ x.mT
            with torch.autocast("cpu", enabled=False):
                scores = F.softmax(scores.float(), -1)
            logits = self.head(x + scores @ x)
            with torch.autocast("cpu", enabled=False):
                return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    ours, by_hand, stock = train(PrecisionPolicy.default()), train(None, ByHand()), train(None)
    for a, b in zip(weights(ours), weights(by_hand), strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(weights(ours), weights(stock), strict=True))


@pytest.mark.parametrize("rules", [{"head": "fp32"}, {"re:he.d": "fp32"}, [("body", "low"), (nn.Linear, "fp32")]])
def test_a_module_runs_in_fp32(rules):
    assert train(rules if isinstance(rules, dict) else PrecisionPolicy(rules)).dtypes["logits"] == torch.float32


def test_an_fp32_module_gets_fp32_inputs_and_equals_fp32_arithmetic():
    seen: list[torch.dtype] = []
    module = Classifier()
    module.body.up.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    applied = AppliedPolicy(PrecisionPolicy({"body": "fp32"}), module, "cpu")
    x = torch.randn(2, 4, WIDTH)
    with torch.autocast("cpu", LOW), applied.in_force(LOW):
        out = module(x)
        stem = module.stem(x)
    applied.detach()
    assert seen == [torch.float32]
    expected = module.body(stem.float())
    with torch.autocast("cpu", LOW):
        assert torch.equal(module.head(expected), out)


def test_a_16_bit_module_inside_an_fp32_one_runs_in_16_bit():
    seen: dict[str, torch.dtype] = {}
    module = Classifier()
    for name in ("up", "down"):
        getattr(module.body, name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
    train(PrecisionPolicy([("body.up", "low"), ("body", "fp32")]), module)
    assert seen == {"up": LOW, "down": torch.float32}


def test_a_second_16_bit_dtype_never_meets_the_cached_cast_of_the_first():
    """torch's cache of cast weights does not ask for the dtype; a tied weight would come in the wrong one."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Tied()
    applied = AppliedPolicy(PrecisionPolicy({"second": "fp16"}), model, "cpu")
    with torch.autocast("cpu", LOW), applied.in_force(LOW):
        out = model(torch.randn(2, 4))
    assert out.dtype == torch.float16


def test_nested_inputs_of_an_fp32_module_are_cast():
    class Sum(nn.Module):
        def forward(self, pair: Any, *, extra: Any) -> Any:
            return {"sum": pair[0] + pair[1] + extra["x"], "count": extra["count"]}

    model = nn.ModuleList([Sum()])
    applied = AppliedPolicy(PrecisionPolicy({"0": "fp32"}), model, "cpu")
    x = torch.ones(2, dtype=LOW)
    with applied.in_force(LOW):
        out = model[0]((x, [x][0]), extra={"x": x, "count": torch.ones(2, dtype=torch.int64)})
    assert (out["sum"].dtype, out["count"].dtype) == (torch.float32, torch.int64)


def test_attention_that_returns_weights_runs_in_fp32_on_the_cpu_and_says_so():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    applied = AppliedPolicy(PrecisionPolicy({"softmax": "fp32"}), attention, "cpu")
    x = torch.randn(1, 3, 8)
    with torch.autocast("cpu", LOW), applied.in_force(LOW):
        with pytest.warns(UserWarning, match="all of it runs in fp32. Pass need_weights=False"):
            _, attention_weights = attention(x, x, x)
        out, _ = attention(x, x, x, need_weights=False)
    assert (attention_weights.dtype, out.dtype) == (torch.float32, LOW)


@pytest.mark.parametrize("where", ["training_step", "on_before_optimizer_step", "forward", "backward"])
def test_after_an_exception_nothing_is_left(where: str):
    module = failing(Classifier, where, lambda m: (m.body.gain, m.body.down))
    with pytest.raises(ArithmeticError, match=where):
        train(PrecisionPolicy(RULES), module)
    assert nothing_is_left(module)


def test_in_a_run_forwards_are_wrapped_and_the_state_dict_is_not_touched():
    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.wrapped = {
                name for name, part in pl_module.named_modules() if isinstance(vars(part).get("forward"), partial)
            }
            self.keys = list(pl_module.state_dict())

    look = Look()
    module = train({"body": "fp32"}, callbacks=[look])
    assert look.wrapped == {"body", "body.up", "body.down"}
    assert look.keys == list(Classifier().state_dict())
    assert nothing_is_left(module)


def test_a_forward_that_somebody_set_comes_back():
    module = Classifier()
    mine = partial(nn.Linear.forward, module.head)
    module.head.forward = mine
    train({"head": "fp32"}, module)
    assert module.head.forward is mine


def test_a_second_fit_and_a_validation_work_with_the_same_plugin(capsys):
    plugin = AutocastPrecision("bf16-mixed", policy={"head": "fp32"})
    for _ in range(2):
        module = Evaluated()
        trainer = fit(module, batches(), validation=batches(), plugin=plugin, limit_val_batches=0)
        trainer = quiet_trainer(plugins=[plugin])
        trainer.validate(module, loader(batches()), verbose=False)
        assert module.dtypes["logits"] == torch.float32
        assert nothing_is_left(module)
    assert capsys.readouterr().out.count("1 'head'") == 1, "the same table is printed once"


def test_fp16_in_an_fp16_run_is_taken():
    AutocastPrecision("16-mixed", policy={"head": "fp16", "stem": "bf16"})


@pytest.mark.parametrize(
    ("eval_precision", "dtype"),
    [("32-true", torch.float32), ("16-mixed", torch.float16), ("bf16-mixed", LOW), (None, LOW)],
)
@pytest.mark.parametrize("policy", [None, [("stem", "low"), ("losses", "fp32")]], ids=["bare", "policy"])
def test_evaluation_runs_in_its_own_precision(eval_precision: Any, dtype: torch.dtype, policy: Any):
    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.training = pl_module.dtypes["logits"]

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.validation = pl_module.dtypes["logits"]

    module, watch = Evaluated(), Watch()
    rules = PrecisionPolicy(policy) if policy else None
    plugin = AutocastPrecision("bf16-mixed", policy=rules, eval_precision=eval_precision)
    trainer = fit(module, batches(), watch, validation=batches(), plugin=plugin, num_sanity_val_steps=1)
    assert (watch.training, watch.validation) == (LOW, dtype)
    trainer.validate(module, loader(batches()), verbose=False)
    assert watch.validation == dtype


def test_validation_in_fp32_equals_a_plain_fp32_trainer():
    ours, plain = Evaluated(), Evaluated()
    plugin = AutocastPrecision("bf16-mixed", policy=PrecisionPolicy(RULES), eval_precision="32-true")
    quiet_trainer(plugins=[plugin]).validate(ours, loader(batches()), verbose=False)
    quiet_trainer().validate(plain, loader(batches()), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, plain.losses, strict=True))


@pytest.mark.parametrize(
    ("policy", "param_dtype"),
    [(None, LOW), (PrecisionPolicy.default(), LOW), ({"head": "low"}, LOW), ({"head": "fp32"}, None)],
    ids=["none", "default", "low", "fp32-module"],
)
def test_fsdp1_gathers_fp32_parameters_only_for_a_rule_about_a_module(policy: Any, param_dtype: Any):
    config = AutocastPrecision("bf16-mixed", policy=policy).mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (param_dtype, torch.float32, torch.float32)


def test_another_precision_for_evaluation_is_refused_under_fsdp1(monkeypatch: pytest.MonkeyPatch):
    plugin = AutocastPrecision("bf16-mixed", eval_precision="32-true")
    trainer = quiet_trainer(plugins=[plugin])
    module = Classifier()
    module.trainer = trainer
    trainer.strategy.connect(module)
    monkeypatch.setattr(trainer.strategy, "__class__", FSDPStrategy)
    monkeypatch.setattr(FSDPStrategy, "root_device", torch.device("cpu"))
    with pytest.raises(MisconfigurationException, match=r"eval_precision='32-true'\) with FSDPStrategy: it gathers"):
        plugin.convert_module(module)
