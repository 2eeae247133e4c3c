"""What rules of a policy mean, which one wins, and what is refused. Pure: no Trainer, no forward."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_mp import AutocastPrecision, Float8Precision, PrecisionPolicy
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.training.policy import resolved
from lightning_mp.training.policy.operations import FAMILIES, KNOWN_OPERATIONS


class RMSNorm(nn.Module):
    """A norm written by hand: no module of torch.nn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class LlamaRMSNorm(RMSNorm):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.final_norm = LlamaRMSNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def dtypes(rules: object, model: nn.Module | None = None) -> dict[str, object]:
    resolved = PrecisionPolicy(rules).resolve(model or Model())
    return {module.name: module.dtype for module in resolved.modules if module.dtype is not None}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head", {"head"}),
        ("module:head", {"head"}),
        ("blocks.*.norm", {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
        (
            "blocks.1",
            {"blocks.1", "blocks.1.norm", "blocks.1.mlp", "blocks.1.mlp.0", "blocks.1.mlp.1", "blocks.1.mlp.2"},
        ),
        ("re:blocks\\.[02]\\.norm", {"blocks.0.norm", "blocks.2.norm"}),
        ("re:norm|head", {"head"}),
        (nn.LayerNorm, {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
        ("class:LayerNorm", {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
        ("class:torch.nn.modules.normalization.LayerNorm", {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
        ("class:RMSNorm", {"final_norm"}),
        ("class:*RMSNorm", {"final_norm"}),
    ],
)
def test_a_pattern_reaches_the_modules_it_names_and_what_is_inside_of_them(pattern, names):
    assert dtypes([(pattern, "fp32")]) == dict.fromkeys(names, torch.float32)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("low", "low"),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_every_dtype_that_the_message_offers_is_understood(text, dtype):
    assert dtypes({"head": text}) == {"head": dtype}


def test_the_first_rule_wins_whatever_is_more_special():
    assert dtypes([("blocks.0.mlp.2", "low"), ("blocks.0", "fp32"), ("blocks.*", "bf16")])["blocks.0.mlp.2"] == "low"
    found = dtypes([("blocks.0", "fp32"), (nn.Linear, "bf16")])
    assert found["blocks.0.mlp.2"] == torch.float32
    assert found["blocks.1.mlp.2"] == found["head"] == torch.bfloat16


def test_a_mapping_is_read_in_its_order():
    assert dtypes({"blocks.0": "fp32", "blocks.*": "bf16"}) == dtypes([("blocks.0", "fp32"), ("blocks.*", "bf16")])


def test_a_shared_module_follows_the_first_rule_of_any_of_its_names():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    assert dtypes({"b": "fp32"}, model) == {"a": torch.float32}
    assert dtypes([("b", "fp32"), ("a", "fp32")], model) == {"a": torch.float32}


def test_names_are_those_of_the_author_whatever_has_wrapped_the_modules():
    model = Model(2)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert [name for name, _ in named_modules(model)] == [name for name, _ in Model(2).named_modules()]
    assert dtypes({"blocks.*.mlp.2": "fp32"}, model) == dict.fromkeys(
        ["blocks.0.mlp.2", "blocks.1.mlp.2"], torch.float32
    )


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("haed", "head"),
        ("block.*.mlp.2", "blocks.0.mlp.2"),
        ("mlp.2", "blocks.0.mlp.2"),
        ("re:blocks\\.7", "blocks.0"),
        ("class:LayrNorm", "class:LayerNorm"),
        ("LayerNorm", "class:LayerNorm"),
        ("soft", "softmaxes"),
        (nn.LSTM, "GELU"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error_with_near_misses(pattern, near):
    text = pattern if isinstance(pattern, str) else f"class:{pattern.__name__}"
    with pytest.raises(ValueError, match=r"matches none of the model's \d+ modules\.") as error:
        PrecisionPolicy([("head", "low"), (pattern, "fp32")]).resolve(Model())
    assert f"Rule 2 of the policy, {text!r}: fp32" in str(error.value)
    if pattern is not nn.LSTM:
        assert near in re.search(r"Near misses: (.*?)\. ", str(error.value))[1].split(", ")


def test_a_rule_that_an_earlier_one_leaves_nothing_is_an_error():
    policy = PrecisionPolicy([("blocks.*", "bf16"), ("blocks.0.mlp", "fp32")])
    with pytest.raises(
        ValueError, match=r"Rule 2 .*'blocks\.0\.mlp': fp32, can never win.*rule 1 \('blocks\.\*': bf16"
    ):
        policy.resolve(Model())
    PrecisionPolicy([("blocks.*", "fp32"), ("blocks.0.mlp", "fp32")]).resolve(Model())  # it says the same


def test_a_name_that_is_an_operation_and_a_module_has_to_be_made_clear():
    model = nn.ModuleDict({"softmax": nn.Softmax(-1)})
    with pytest.raises(
        ValueError, match=r"about an operation, but the model also has a module of that name.*'op:softmax' or"
    ):
        PrecisionPolicy({"softmax": "fp32"}).resolve(model)
    assert dtypes({"module:softmax": "fp32"}, model) == {"softmax": torch.float32}
    assert PrecisionPolicy({"op:softmax": "fp32"}).resolve(model).operation_dtype("softmax") == torch.float32


def test_default_is_never_ambiguous_and_matches_any_model():
    model = nn.ModuleDict({name: nn.Identity() for name in FAMILIES})
    resolved = PrecisionPolicy.default().resolve(model)
    fp32 = {name for family in FAMILIES if family != "matmuls" for name in FAMILIES[family]} & KNOWN_OPERATIONS
    assert {name for name in KNOWN_OPERATIONS if resolved.operation_dtype(name) == torch.float32} == fp32
    assert {name for name in KNOWN_OPERATIONS if resolved.operation_dtype(name) == "low"} == set(FAMILIES["matmuls"])


def test_operations_are_named_by_family_member_glob_or_any_function_of_torch():
    resolved = PrecisionPolicy([("op:*_norm", "bf16"), ("op:cumsum", "fp32")]).resolve(Model())
    assert resolved.operation_dtype("batch_norm") == resolved.operation_dtype("layer_norm") == torch.bfloat16
    assert resolved.operation_dtype("cumsum") == torch.float32
    assert resolved.operation_dtype("softmax") is None


def test_modules_that_stay_in_fp32_are_those_of_fp32_rules_and_fp32_operations():
    resolved = PrecisionPolicy([("blocks.0", "fp32"), ("head", "bf16"), ("norms", "fp32")]).resolve(Model(2))
    assert resolved.modules_not_used_in(torch.bfloat16) == (
        "blocks.0.norm",
        "blocks.0.mlp.0",
        "blocks.0.mlp.2",
        "blocks.1.norm",
    )
    assert resolved.modules_not_used_in(torch.float16) == (*resolved.modules_not_used_in(torch.bfloat16), "head")


def test_a_16_bit_rule_about_a_block_leaves_its_norms_to_the_rule_about_norms():
    resolved = PrecisionPolicy([("blocks.0", "bf16"), ("norms", "fp32")]).resolve(Model(1))
    assert resolved.modules_not_used_in(torch.bfloat16) == ("blocks.0.norm",)
    assert set(resolved.modules_not_used_in(torch.float16)) == {"blocks.0.norm", "blocks.0.mlp.0", "blocks.0.mlp.2"}


def test_the_table_has_a_row_per_rule_and_like_named_modules():
    policy = PrecisionPolicy(
        [("blocks.*.mlp", "bf16"), ("head", torch.float32), ("softmax", "fp32"), ("losses", "fp32")]
    )
    assert str(policy.resolve(Model())).splitlines()[2:] == [
        "blocks.*.mlp (3 modules)                                        1 'blocks.*.mlp'  bf16",
        "head                                                            2 'head'          fp32",
        "softmax                                                         3 'softmax'       fp32",
        "losses: cross_entropy, nll_loss, mse_loss, l1_loss and 17 more  4 'losses'        fp32",
        "everything else                                                 -                 as autocast has it",
    ]


def test_a_rule_about_the_whole_model_has_a_row_that_says_so():
    table = str(PrecisionPolicy([(Model, "fp32")]).resolve(Model()))
    assert table.splitlines()[2].split() == ["(the", "model)", "1", "'class:Model'", "fp32"]


@pytest.mark.parametrize("with_rich", [True, False], ids=["rich", "plain"])
def test_the_table_prints_with_rich_and_without(with_rich, monkeypatch, capsys):
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr(resolved, "find_spec", lambda name: None)
    resolved.show(PrecisionPolicy({"head": "fp32", "softmax": "low"}).resolve(Model()))
    printed = capsys.readouterr().out
    for word in ("1 'head'", "fp32", "2 'softmax'", "low", "as autocast has it"):
        assert word in printed
    assert ("Precision policy" in printed) == with_rich


def test_the_policy_reads_back_from_its_repr():
    policy = PrecisionPolicy([("head", "fp32"), ("softmax", torch.bfloat16), (nn.Linear, "low")])
    assert repr(policy) == "PrecisionPolicy([('head', 'fp32'), ('softmax', 'bf16'), ('class:Linear', 'low')])"
    assert repr(eval(repr(policy))) == repr(policy)


def test_rules_can_be_put_before_those_of_another_policy():
    policy = PrecisionPolicy({"head": "fp32"})
    assert PrecisionPolicy([(nn.Linear, "fp32"), *policy.rules]).rules[1:] == policy.rules


@pytest.mark.parametrize("plugin", [partial(AutocastPrecision, "bf16-mixed"), Float8Precision])
def test_every_plugin_takes_the_default_policy_by_its_name(plugin):
    assert repr(plugin(policy="default").policy) == repr(PrecisionPolicy.default())
