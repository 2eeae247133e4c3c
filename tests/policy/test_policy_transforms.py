"""Policies under torch.compile, activation checkpointing and deep copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from policy_models import LOW, RULES, WIDTH, Classifier, batches, step_under, train
from small_models import StepsByHand, weights
from torch import Tensor, nn

from lightning_mp import PrecisionPolicy
from lightning_mp.language_model import GPT, GPTConfig
from lightning_mp.training.policy.applied import AppliedPolicy

RULES_OF_GPT = {"blocks.0.*": "fp32", "final_norm": "fp32", "blocks.*": "low", "softmaxes": "fp32"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "checkpointed"])
def test_compiled_in_one_graph_it_computes_the_same(backend: str, reentrant: bool | None):
    """Also the gradients of what is fp32: torch.compile alone would trace their backward under autocast."""
    torch._dynamo.reset()
    model = Classifier(reentrant)
    applied = AppliedPolicy(PrecisionPolicy(RULES), model, "cpu")
    x = batches(1)[0][0]
    expected, expected_gradients = step_under(applied, model, x)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        out, gradients = step_under(applied, compiled, x)
        assert torch.equal(out, expected)
        for ours, eager in zip(gradients, expected_gradients, strict=True):
            assert torch.equal(ours, eager)


# Of torch.Tensor, those that are written in Python and that torch.compile traces without a policy.
METHODS: dict[str, Callable[[Tensor], Any]] = {
    "unflatten": lambda x: x.unflatten(1, (2, WIDTH // 2)).unflatten(dim=-1, sizes=(2, -1)),
    "split": lambda x: x.split(2, 1)[0],
    "norm": lambda x: x.norm(dim=1),
    "rsub": lambda x: 1 - x,
    "rdiv": lambda x: 1 / x,
    "rpow": lambda x: 2.0**x,
    "floordiv": lambda x: x // 2,
    "matmul": lambda x: torch.ones(2, x.shape[0]) @ x,
    "iter": lambda x: torch.stack([*x]),
    "len": lambda x: x * len(x),
    "stft": lambda x: x.stft(4, window=torch.ones(4), return_complex=True).abs(),
}


@pytest.mark.parametrize("method", METHODS)
def test_no_method_of_tensors_breaks_the_graph(method: str) -> None:
    torch._dynamo.reset()
    applied = AppliedPolicy(PrecisionPolicy(RULES), Classifier(), "cpu")
    call = METHODS[method]
    x = torch.rand(4, WIDTH)
    with torch.autocast("cpu", LOW), applied.in_force(LOW):
        expected = call(x)
        assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.full
@pytest.mark.parametrize("rules", [{"norms": "fp32"}, RULES_OF_GPT], ids=["norms", "modules"])
def test_the_compiled_gpt_is_one_graph(rules: dict[str, str]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, block_tokens=16, vocab=64))
    applied = AppliedPolicy(PrecisionPolicy(rules), model, "cpu")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tokens = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", LOW), applied.in_force(LOW):
        assert torch.equal(compiled(tokens), model(tokens))


def test_a_compiled_model_follows_when_the_policy_falls_asleep():
    torch._dynamo.reset()
    model = Classifier()
    applied = AppliedPolicy(PrecisionPolicy({"head": "fp32"}), model, "cpu")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = batches(1)[0][0]
    with torch.autocast("cpu", LOW):
        with applied.in_force(LOW):
            assert compiled(x).dtype == torch.float32
        assert compiled(x).dtype == LOW
        with applied.in_force(LOW):
            assert compiled(x).dtype == torch.float32


class Manual(StepsByHand, Classifier):
    pass


@pytest.mark.parametrize("kind", [Classifier, Manual])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not-reentrant", "reentrant"])
def test_manual_and_checkpointed_training_equal_plain_training(kind: type[Classifier], reentrant: bool | None):
    """In manual optimization Lightning alone runs backward under autocast: what is fp32 would get 16-bit gradients."""
    expected = train(PrecisionPolicy(RULES))
    for ours, theirs in zip(weights(train(PrecisionPolicy(RULES), kind(reentrant))), weights(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_backward_takes_what_torch_takes_inside_the_mode():
    x = torch.randn(3, requires_grad=True)
    w = torch.randn(3, requires_grad=True)
    applied = AppliedPolicy(PrecisionPolicy.default(), nn.Identity(), "cpu")
    with applied.in_force(LOW):
        (x * w).backward(torch.ones(3), retain_graph=True)
        assert torch.equal(x.grad, w)
        (x * w).sum().backward(inputs=[x])
        assert torch.equal(x.grad, 2 * w)
        assert torch.equal(w.grad, x)
        x.square().sum().backward(inputs=x)
        assert torch.equal(x.grad, 2 * w + 2 * x)
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            (x * w).backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()


def test_a_copy_made_in_training_has_its_own_weights_and_is_plain_afterwards():
    class Copying(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.copy = copy.deepcopy(pl_module.body)
            self.pickled = pickle.dumps(pl_module.head)

    copying = Copying()
    module = train({"body": "fp32", "head": "low"}, callbacks=[copying])
    x = torch.randn(2, 4, WIDTH)
    nn.init.zeros_(module.body.down.weight)
    with torch.autocast("cpu", LOW):
        assert copying.copy.up(x).dtype == LOW, "the copy still follows a policy that is over"
    assert copying.copy.forward.args[0].__self__ is copying.copy
    assert not torch.equal(copying.copy(x), module.body(x))
    head = pickle.loads(copying.pickled)
    assert torch.equal(head(x), module.head(x))
