"""Which linear layers multiply in fp8, and that turning them into fp8 layers changes nothing else."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.language_model.gpt import GPT, Block, GPTConfig
from lightning_mp.training.policy.float8_layers import choose_float8_layers
from lightning_mp.training.precision.float8 import try_float8, why_no_float8
from lightning_mp.training.precision.fp8.conversion import RECIPES, Float8Conversion, convert_to_float8, float8_config

CPU = torch.device("cpu")
REAL_AND_EMULATED = pytest.mark.parametrize("emulate", [False, True], ids=["real", "emulated"])


def gpt() -> GPT:
    return GPT(GPTConfig(layers=2, heads=2, width=32, block_tokens=16, vocab=64))


def chain(num_layers: int = 4, **arguments: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, **arguments) for _ in range(num_layers)))


def chosen(model: nn.Module, *skip: Any, **arguments: Any) -> list[str]:
    return [layer.name for layer in choose_float8_layers(model, skip, **arguments) if layer.skipped_because is None]


def reasons(model: nn.Module, *skip: Any, **arguments: Any) -> dict[str, str | None]:
    return {layer.name: layer.skipped_because for layer in choose_float8_layers(model, skip, **arguments)}


def convert(model: nn.Module, recipe: str = "rowwise", emulate: bool = False, **arguments: Any) -> Float8Conversion:
    return convert_to_float8(choose_float8_layers(model, **arguments), float8_config(recipe, emulate=emulate))


def fp8_linear(recipe: str, emulate: bool = False, bias: bool = False) -> nn.Linear:
    model = nn.Sequential(nn.Linear(32, 48, bias=bias))
    convert(model, recipe, emulate, skip_first_and_last=False)
    return model[0]


def in_bf16(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(x)


# -- which layers ------------------------------------------------------------------------------------------------------


def test_of_a_gpt_all_but_the_first_layer_and_the_tied_head_multiply_in_fp8():
    assert reasons(gpt()) == {
        "blocks.0.attention.query_key_value": "it is the first Linear",
        "blocks.0.attention.output": None,
        "blocks.0.mlp.up": None,
        "blocks.0.mlp.down": None,
        "blocks.1.attention.query_key_value": None,
        "blocks.1.attention.output": None,
        "blocks.1.mlp.up": None,
        "blocks.1.mlp.down": None,
        "head": "its weight is also that of token_embedding (Embedding)",
    }


@pytest.mark.parametrize(
    ("in_features", "out_features", "reason"),
    [
        (32, 48, None),
        (32, 40, "out_features is 40, not a multiple of 16"),
        (8, 48, "in_features is 8, not a multiple of 16"),
    ],
)
def test_sizes_that_fp8_kernels_cannot_take_are_left_out(in_features, out_features, reason):
    model = nn.Sequential(nn.Linear(in_features, out_features))
    assert reasons(model, skip_first_and_last=False) == {"0": reason}


@pytest.mark.parametrize(
    ("skip", "left_out"),
    [
        (("blocks.0.mlp.up",), {"blocks.0.mlp.up"}),
        (("blocks.1",), {f"blocks.1.{name}" for name in ("attention.query_key_value", "attention.output")}
         | {"blocks.1.mlp.up", "blocks.1.mlp.down"}),
        (("*.mlp",), {f"blocks.{i}.mlp.{name}" for i in (0, 1) for name in ("up", "down")}),
        (("*.down", "blocks.?.attention.output"), {f"blocks.{i}.{name}" for i in (0, 1)
                                                   for name in ("mlp.down", "attention.output")}),
        (("head",), set()),
    ],
)  # fmt: skip
def test_names_and_globs_match_a_layer_or_a_module_around_it(skip, left_out):
    assert set(chosen(gpt())) - set(chosen(gpt(), *skip)) == left_out
    named = {name for name, reason in reasons(gpt(), *skip).items() if reason and reason.startswith("skip=")}
    assert named >= left_out


def test_classes_match_the_layers_inside_them():
    assert chosen(gpt(), Block) == []
    assert reasons(gpt(), Block)["blocks.0.mlp.up"] == "skip=Block"


def test_a_single_name_needs_no_list():
    assert [layer.skipped_because for layer in choose_float8_layers(chain(3), "1")][1] == "skip='1'"


@pytest.mark.parametrize("entry", ["heads", "*.lm_head", "final_norm", nn.Conv1d], ids=str)
def test_an_entry_that_matches_no_linear_is_an_error_that_lists_them(entry):
    written = repr(entry) if isinstance(entry, str) else entry.__name__
    with pytest.raises(ValueError, match=r"matches no nn.Linear") as raised:
        choose_float8_layers(gpt(), ["head", entry])
    text = str(raised.value)
    assert text.startswith(f"skip={written} matches no nn.Linear, and no module that contains one.")
    assert "The Linear layers of GPT are: blocks.0.attention.query_key_value, " in text
    assert text.endswith(", head.")


class LoRALinear(nn.Linear):
    """Computes more than a Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_subclasses_of_linear_keep_their_own_computation():
    """torchao's own conversion would drop the subclass's forward, and never reach attention's `out_proj`."""
    model = nn.ModuleDict(
        {"lora": LoRALinear(32, 32), "attention": nn.MultiheadAttention(32, 2), "plain": nn.Linear(32, 32)}
    )
    assert reasons(model, skip_first_and_last=False) == {
        "lora": "its class is LoRALinear, a subclass of nn.Linear",
        "attention.out_proj": "its class is NonDynamicallyQuantizableLinear, a subclass of nn.Linear",
        "plain": None,
    }
    convert(model, skip_first_and_last=False)
    assert torch.equal(model["lora"](torch.zeros(1, 32)), model["lora"].bias.expand(1, 32) + 1)


def test_a_layer_with_two_names_counts_once_and_answers_to_both():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["again"] = model["b"]
    assert chosen(model) == ["b"]
    assert reasons(model, "again")["b"] == "skip='again'"


def test_names_are_those_without_torch_compile():
    model = nn.Sequential(torch.compile(chain(3), backend="eager"), nn.Linear(32, 32))
    assert chosen(model) == ["0.1", "0.2"]
    assert chosen(model, "0.1") == ["0.2"]


# -- conversion --------------------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, id(p), p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()],
        "keys": list(model.state_dict()),
        "training": [module.training for module in model.modules()],
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_keeps_modules_parameters_names_freezing_and_tying(recipe):
    """D26; D25: in place."""
    model = gpt()
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    model.blocks[1].eval()
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
    before, random_state = state_of(model), torch.get_rng_state()
    values = copy.deepcopy(model.state_dict())
    conversion = convert(model, recipe)
    assert len(conversion.linears) == 7
    assert {type(linear).__name__ for linear in conversion.linears} == {"Float8Linear"}
    assert state_of(model) == before
    assert model.head.weight is model.token_embedding.weight
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


def test_undoing_leaves_no_trace():
    model = gpt()
    tokens = torch.randint(64, (2, 16))
    expected, before = model(tokens), [(type(m), list(vars(m)), list(m._forward_pre_hooks)) for m in model.modules()]
    conversion = convert(model)
    assert not torch.equal(model(tokens), expected)
    conversion.undo()
    assert [(type(m), list(vars(m)), list(m._forward_pre_hooks)) for m in model.modules()] == before
    assert torch.equal(model(tokens), expected)


def test_hooks_of_others_stay():
    model = chain(3)
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].weight.register_hook(lambda _: seen.append("gradient"))
    conversion = convert(model)
    in_bf16(model, torch.randn(4, 32)).float().sum().backward()
    conversion.undo()
    model(torch.randn(4, 32))
    assert seen == ["forward", "gradient", "forward"]


def test_a_frozen_weight_gets_no_gradient_and_passes_gradients_on():
    model = chain(3)
    model[1].requires_grad_(False)
    convert(model)
    in_bf16(model, torch.randn(4, 32)).float().square().sum().backward()
    assert model[1].weight.grad is None
    assert model[1].bias.grad is None
    assert model[0].weight.grad.abs().sum() > 0


def test_a_weight_of_two_layers_stays_one_weight_and_gets_both_gradients():
    untied = chain(4)
    untied[2].load_state_dict(untied[1].state_dict())
    tied = copy.deepcopy(untied)
    tied[2].weight = tied[1].weight
    for model in (untied, tied):
        convert(model)
        in_bf16(model, torch.linspace(-1, 1, 4 * 32).view(4, 32)).float().square().sum().backward()
    assert tied[2].weight is tied[1].weight
    torch.testing.assert_close(tied[1].weight.grad, untied[1].weight.grad + untied[2].weight.grad)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_an_ordinary_layer(copied):
    """Nothing would undo its conversion."""
    model = chain(3)
    plain = copy.deepcopy(model)
    convert(model)
    x = torch.randn(4, 32)
    assert not torch.equal(in_bf16(model, x), in_bf16(plain, x))
    assert torch.equal(in_bf16(copied(model), x), in_bf16(plain, x))
    assert vars(copied(model)[1]).keys() == vars(plain[1]).keys()


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_compile_finds_one_graph_and_computes_the_same(recipe):
    model = chain(3)
    convert(model, recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for function in (model, compiled):
        model.zero_grad()
        output = in_bf16(function, torch.linspace(-1, 1, 16 * 32).view(16, 32))
        output.float().square().sum().backward()
        results.append([output, *(p.grad.clone() for p in model.parameters())])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
    with torch.inference_mode():
        assert torch.equal(in_bf16(compiled, torch.linspace(-1, 1, 16 * 32).view(16, 32)), results[0][0])


# -- what an fp8 layer computes ----------------------------------------------------------------------------------------


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None, recipe: str) -> Tensor:
    """To fp8 and back, with one factor for the whole tensor or, along `dim`, one per row."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax.double()).float()
    if recipe != "tensorwise":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).to(dtype).float() / scale


def reference(recipe: str, x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input and gradient of the weight by plain torch, from torchao's description."""
    e4m3, gradients = torch.float8_e4m3fn, torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    row, column = (None, None) if recipe == "tensorwise" else (1, 0)
    output = rounded(x, e4m3, row, recipe) @ rounded(weight, e4m3, row, recipe).T
    if recipe == "rowwise_with_gw_hp":
        grad_input = rounded(grad_output, gradients, row, recipe) @ rounded(weight, e4m3, None, recipe)
        return output, grad_input, grad_output.float().T @ x.float()
    grad_input = rounded(grad_output, gradients, row, recipe) @ rounded(weight, e4m3, column, recipe)
    grad_weight = rounded(grad_output, gradients, column, recipe).T @ rounded(x, e4m3, column, recipe)
    return output, grad_input, grad_weight


@REAL_AND_EMULATED
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [64, 7, 1])
def test_products_equal_those_of_rounded_factors(recipe, rows, emulate):
    """Any number of rows: kernels want multiples of 16. D27: all recipes under CPU autocast."""
    linear = fp8_linear(recipe, emulate)
    x = torch.randn(rows, 32).bfloat16()
    grad_output = torch.randn(rows, 48).bfloat16()
    leaf = x.float().requires_grad_()  # autocast has to cast it
    output = in_bf16(linear, leaf)
    assert output.dtype is torch.bfloat16
    output.backward(grad_output)
    expected = reference(recipe, x, linear.weight.detach(), grad_output)
    # What differs is the last rounding, of sums, to bf16: 2^-8.
    for actual, wanted in zip((output, leaf.grad, linear.weight.grad), expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())
    assert linear.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [64, 7, 1])
def test_products_reach_the_kernel_in_sizes_that_cuda_takes(monkeypatch, recipe, rows):
    """A CPU takes any size; CUDA refuses inner sizes and row lengths that are no multiples of 16."""
    scaled_mm, sizes = torch._scaled_mm, []

    def note(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.extend([a.shape[1], b.shape[0], b.shape[1]])
        return scaled_mm(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", note)
    in_bf16(fp8_linear(recipe), torch.randn(rows, 32, requires_grad=True)).float().sum().backward()
    assert len(sizes) == 3 * (2 if recipe == "rowwise_with_gw_hp" else 3)
    assert [size for size in sizes if size % 16] == []


def test_the_bias_is_added_after_the_product():
    linear = fp8_linear("rowwise", bias=True)
    with torch.no_grad():
        linear.bias.fill_(3.0)
    assert torch.equal(in_bf16(linear, torch.zeros(2, 32)), torch.full((2, 48), 3.0).bfloat16())


def test_more_dimensions_and_keyword_arguments_work():
    linear = fp8_linear("rowwise")
    x = torch.randn(2, 3, 5, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear(input=x)
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, in_bf16(linear, x.flatten(0, 2)).view(2, 3, 5, 48))


@REAL_AND_EMULATED
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(recipe, emulate, bad):
    """A saturating cast that turned inf into 448 would hide an overflow from the skip."""
    linear = fp8_linear(recipe, emulate)
    x = torch.randn(16, 32)
    x[3, 5] = bad
    assert not in_bf16(linear, x)[3].isfinite().any()
    output = in_bf16(linear, torch.randn(16, 32))
    grad_output = torch.randn(16, 48).bfloat16()
    grad_output[3, 5] = bad
    output.backward(grad_output)
    assert not linear.weight.grad[5].isfinite().any()


@pytest.mark.parametrize("dimensions", [(16,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_inference_mode_computes_the_same(recipe, dimensions):
    """Lightning validates in it; torchao 0.18 alone fails there with factors per row."""
    linear = fp8_linear(recipe, bias=True)
    expected = in_bf16(linear, torch.linspace(-1, 1, 32).expand(*dimensions, 32))
    with torch.inference_mode():
        inside = in_bf16(linear, torch.linspace(-1, 1, 32).expand(*dimensions, 32) + 0)
    assert torch.equal(inside, expected)
    assert not inside.requires_grad


def test_a_forward_that_somebody_replaced_is_not_replaced_again():
    model = chain(3)
    model[1].forward = lambda x: x
    assert reasons(model)["1"] == "its forward was replaced on the object"


def test_without_autocast_the_input_keeps_its_dtype():
    assert fp8_linear("rowwise")(torch.randn(2, 32)).dtype is torch.float32


# -- options and devices -----------------------------------------------------------------------------------------------


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ModuleNotFoundError, match=r"fp8 needs torchao, which is not installed: pip install '.\[fp8\]'"):
        float8_config("rowwise")


@pytest.mark.parametrize(
    "device",
    [
        {"device_type": "cpu"},
        {"device_type": "cpu", "emulate": True},
        {"device_type": "cuda", "capability": (8, 9)},
        {"device_type": "cuda", "capability": (9, 0)},
        {"device_type": "cuda", "capability": (12, 0)},
        {"device_type": "cuda", "capability": (7, 0), "emulate": True},
        {"device_type": "cuda", "rocm_architecture": "gfx942:sramecc+:xnack-"},
        {"device_type": "xpu", "emulate": True},
    ],
    ids=str,
)
def test_devices_that_can_are_taken(device):
    assert why_no_float8(**device) is None


@pytest.mark.parametrize(
    ("device", "wrong", "instead"),
    [
        ({"device_type": "cuda", "capability": (8, 6)}, "compute capability 8.6, and fp8", "emulate=True"),
        ({"device_type": "cuda", "capability": (8, 0)}, "come with 8.9 (Ada)", "AutocastPrecision('bf16-mixed')"),
        ({"device_type": "cuda", "rocm_architecture": "gfx90a:x"}, "it is an AMD gfx90a", "emulate=True"),
        ({"device_type": "mps", "emulate": True}, "no fp8 numbers on MPS", "AutocastPrecision('bf16-mixed')"),
        ({"device_type": "xpu"}, "on 'xpu'", "emulate=True"),
    ],
    ids=str,
)
def test_devices_that_cannot_are_told_why_and_what_to_do(device, wrong, instead):
    reason = why_no_float8(**device)
    assert wrong in reason
    assert instead in reason


@REAL_AND_EMULATED
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trial_works_here_and_draws_no_random_numbers(recipe, emulate):
    random_state = torch.get_rng_state()
    refusal = try_float8(float8_config(recipe, emulate=emulate), CPU)
    assert refusal is None, refusal
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_trial_hands_on_what_the_device_says(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel for this\nsecond line")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert try_float8(float8_config("rowwise"), CPU) == "no kernel for this"
    assert try_float8(float8_config("rowwise", emulate=True), CPU) is None


def test_a_torch_without_this_product_on_a_cpu_says_what_to_do(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.\nC++ frames")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert re.fullmatch(
        r"Now _scaled_mm only supports per-tensor scaling for CPU backend\. \(torch \S+; 2\.13 can\.\)"
        r" Use AutocastPrecision\('bf16-mixed'\), or emulate=True to try out the numerics of fp8, slowly\.",
        try_float8(float8_config("rowwise"), CPU),
    )
