"""Promise: a recommendation's code compiles and loads, its classes exist, and each choice has a reason and a source."""

import ast
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

import lightning_mp
from lightning_mp import recommend
from lightning_mp.ground.flops.device_traits import find_device, named_device
from lightning_mp.ground.flops.hardware import known_chips
from lightning_mp.planning import DecoderConfig, decoder_memory
from lightning_mp.planning.advice.recommendation import Component

LLAMA_8B = DecoderConfig(layers=32, width=4096, vocabulary=128256, heads=32, kv_heads=8, ffn_width=14336)
GPT2 = DecoderConfig(layers=12, width=768, vocabulary=50257, gated=False, tied_head=True)
CASES = [
    ("V100", {"model": "100M"}),
    ("T4", {"model": "100M", "goal": "finetune"}),
    ("T4", {"goal": "gan", "gpus": 2}),
    ("A100", {"model": LLAMA_8B, "gpus": 16, "tokens_per_step": "4M"}),
    ("A100", {"model": "7B", "goal": "adapters"}),
    ("L40S", {"model": GPT2}),
    ("H100", {"model": LLAMA_8B, "gpus": 8}),
    ("H100", {"model": LLAMA_8B, "gpus": 8, "goal": "finetune", "context_tokens": 16384}),
    ("H100", {"model": "7B", "goal": "inference"}),
    ("MI300X", {"model": GPT2, "gpus": 8}),
    ("A100", {"model": "300K"}),
    ("mps", {"model": "1B"}),
    ("cpu", {}),
]


def what(answer):
    return {choice.what: choice.value for choice in answer.choices}


@pytest.mark.parametrize(("device", "arguments"), CASES)
def test_the_code_makes_what_was_recommended(device, arguments):
    """Both renderings name existing classes and arguments, and every class takes what is written."""
    answer = recommend(device, **arguments)
    tree = ast.parse(answer.python())
    imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names]
    ours = {name: getattr(lightning_mp, name) for name in imported}
    trainer = next(n for n in ast.walk(tree) if isinstance(n, ast.Call))
    made = {word.arg: eval(compile(ast.Expression(word.value), "code", "eval"), ours) for word in trainer.keywords}

    loaded = yaml.safe_load(answer.yaml())["trainer"]
    assert list(loaded) == list(made)
    for name, value in loaded.items():
        if name in ("plugins", "callbacks"):
            assert [type(part) for part in made[name]] == [class_of(part) for part in value]
        elif isinstance(value, dict):
            assert type(made[name]) is class_of(value)
        else:
            assert made[name] == value
    for choice in answer.choices:
        assert len(choice.reason) > 30
        assert choice.source
        assert choice.sure in ("certain", "likely", "measure it")


def class_of(part):
    """Of a class path, whose arguments the class must have."""
    module, _, name = part["class_path"].rpartition(".")
    assert module == "lightning_mp"
    arguments = part.get("init_args", {})
    assert arguments.keys() <= inspect.signature(getattr(lightning_mp, name)).parameters.keys()
    for value in arguments.values():
        if isinstance(value, dict):
            class_of(value)
    return getattr(lightning_mp, name)


@pytest.mark.parametrize(
    ("device", "precision"),
    [("V100", "16-mixed"), ("T4", "16-mixed"), ("RTX 3090", "bf16-mixed"), ("A100", "bf16-mixed"),
     ("L4", "bf16-mixed"), ("RTX 4090", "bf16-mixed"), ("RTX 5090", "bf16-mixed"), ("MI300X", "bf16-mixed"),
     ("H100", "fp8-mixed"), ("B200", "fp8-mixed"), ("cpu", "32-true"), ("mps", "32-true")],
)  # fmt: skip
def test_precision_by_device(device, precision):
    assert recommend(device, model=LLAMA_8B).choice("precision").value == precision


def test_fp16_brings_a_loss_scale_and_bf16_does_not():
    (plugin,) = recommend("T4").plugins
    assert plugin.python() == 'AutocastPrecision(precision="16-mixed", scaler=LossScaler())'
    assert recommend("T4").callbacks == (Component("OverflowMonitor"),)
    assert "including_emulation=False" in recommend("T4").choice("precision").reason
    assert "loss scale" not in what(recommend("A100"))


def test_volta_is_told_which_wheels_have_its_kernels():
    row = recommend("V100").choice("torch")
    assert row.value == "cu126 wheels, 2.11 to 2.14"
    assert "pytorch#172352" in row.source
    assert "torch" not in what(recommend("T4"))


def test_fp8_is_for_large_products_only_and_to_be_measured():
    answer = recommend("H100", model=LLAMA_8B, gpus=8)
    assert answer.choice("precision").sure == "measure it"
    assert answer.choice("fp8 recipe").value == "tensorwise"
    assert "'rowwise'" in answer.choice("fp8 recipe").reason
    assert answer.choice("compile").value == "block.compile()"
    for model, reason in (
        (GPT2, "No fp8 at a width of 768"),
        ("8B", "give the shape of the model"),
        (DecoderConfig(layers=16, width=1520, vocabulary=50257, heads=19), "No fp8 at a width of 1520"),
        (replace(LLAMA_8B, ffn_width=14335), "ffn_width 14335 is not a multiple of 16"),
    ):
        row = recommend("H100", model=model).choice("precision")
        assert row.value == "bf16-mixed"
        assert reason in row.reason


def test_a_speed_is_a_published_one_with_its_source():
    for device, arguments in CASES:
        for choice in recommend(device, **arguments).choices:
            if "x tokens/s" in choice.reason:
                assert "Published" in choice.reason
                assert "nanochat" in choice.source + choice.reason or "torchtitan" in choice.source


def test_what_fits_decides_strategy_and_checkpointing():
    """The reference is the memory formula, asked for each layout by hand."""
    assert what(recommend("A100", model=GPT2, gpus=8))["strategy"] == "ddp"
    sharded = recommend("A100", model=LLAMA_8B, gpus=8)
    assert sharded.choice("strategy").value == 'FSDP2Strategy(shard="auto")'
    assert sharded.fits is True
    assert decoder_memory(LLAMA_8B, context_tokens=4096).verdict(80e9) == "does not fit"
    two_nodes = recommend("H200", model=LLAMA_8B, gpus=16)
    assert "replicate_size=2" in two_nodes.choice("strategy").value
    assert dict(two_nodes.trainer)["devices"] == 8
    assert dict(two_nodes.trainer)["num_nodes"] == 2
    long = recommend("A100", model=LLAMA_8B, gpus=8, context_tokens=8192, blocks="model.layers.*")
    assert "ActivationCheckpointing('model.layers.*')" in long.choice("checkpointing").value
    assert long.fits is True


def test_what_does_not_fit_is_told_how_many_gpus_would_do():
    answer = recommend("A100", model=LLAMA_8B, goal="finetune")
    row = answer.choice("memory")
    assert answer.fits is False
    assert (row.value, row.sure) == ("does not fit", "certain")
    assert "GPUs suffice, sharded and checkpointed" in row.reason
    of_states = recommend("A100", model="8B", goal="finetune").choice("memory").reason
    for reason in (row.reason, of_states):
        assert "storage='24bit') with AdamW8bit keeps 7 bytes per parameter." in reason
        assert "goal 'adapters'" in reason
    enough = int(row.reason.split(" GPUs suffice")[0].split()[-1])
    assert recommend("A100", model=LLAMA_8B, goal="finetune", gpus=enough).fits is True
    assert recommend("A100", model=LLAMA_8B, goal="finetune", gpus=enough // 2).fits is not True


@pytest.mark.parametrize(("device", "parameters", "verdict"), [("T4", 7e9, "does not fit"), ("V100", 3e9, "may fit")])
def test_where_it_is_not_sure_to_fit_the_layout_that_keeps_least_is_advised(device, parameters, verdict):
    model = DecoderConfig.of_parameters(parameters)
    answer = recommend(device, model=model, gpus=2, context_tokens=1024)
    assert answer.choice("memory").value == verdict
    assert answer.choice("strategy").value == 'FSDP2Strategy(shard="auto")'
    assert "ActivationCheckpointing" in answer.choice("checkpointing").value
    assert answer.choice("memory").reason.startswith("FSDP 2, checkpointed, one sequence of 1,024 tokens")


def test_what_is_sharded_is_told_per_gpu_beside_what_one_has():
    reason = recommend("h100", gpus=64, model="70B").choice("memory").reason
    assert "keep 1043 GiB (16 bytes each), 16.3 GiB on each of 64; one H100 SXM has 74.5 GiB (80 GB)." in reason


def test_parameters_alone_tell_of_states_but_not_of_activations():
    row = recommend("A100", model="1B", gpus=2).choice("memory")
    assert (row.value, row.sure) == ("weights and states fit", "measure it")
    assert "(16 bytes each)" in row.reason
    assert "FSDP2Strategy" in recommend("A100", model="7B", gpus=8).choice("strategy").value
    full = recommend("t4", model="1B").choice("memory")
    assert (full.value, full.sure) == ("little room beside weights and states", "measure it")
    assert "ddp" in recommend("t4", model="500M", gpus=2).choice("strategy").value
    assert "one GPU may not have that much to spare" in recommend("t4", model="900M", gpus=2).choice("strategy").reason
    alone = recommend("A100", model="70B")
    assert alone.fits is False
    assert "14 GPUs would hold them" in alone.choice("memory").reason
    adapters = recommend("A100", model="7B", goal="adapters")
    assert "(2 bytes each)" in adapters.choice("memory").reason
    assert adapters.choice("base weights").value == "frozen, bf16; adapters fp32"
    assert recommend("A100", model="7B", memory_bytes=10e9, goal="inference").fits is False


def test_a_base_that_does_not_fit_in_16_bit_is_advised_in_4():
    memory = recommend("A100", model="7B", memory_bytes=10e9, goal="adapters").choice("memory")
    # 4.127 bits each: Dettmers et al. 2023, section 3
    assert "QLoRA keeps the base in 4 bit, 3.36 GiB: BitsandbytesPrecision('nf4')" in memory.reason
    assert "QLoRA" not in recommend("A100", model="7B", goal="adapters").choice("memory").reason


def test_the_cache_of_keys_and_values_is_counted_for_inference():
    known = recommend("A100", model=LLAMA_8B, context_tokens=8192, goal="inference").choice("memory").reason
    # Llama 3 8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB per token
    assert "The cache of keys and values comes on top: 1 GiB per sequence of 8,192 tokens." in known
    assert (
        "give the shape of the decoder to count it"
        in recommend("A100", model="7B", goal="inference").choice("memory").reason
    )


def test_goals():
    gan = recommend("A100", goal="gan", gpus=2)
    assert gan.plugins[0].python() == 'AutocastPrecision(precision="bf16-mixed")'
    assert dict(gan.trainer)["strategy"] == "ddp_find_unused_parameters_true"
    assert "both optimizers" in recommend("T4", goal="gan").choice("loss scale").reason
    choice = recommend("H100", goal="inference").choice("precision")
    assert choice.value == "Trainer(precision='bf16-true')"  # in the plugins' vocabulary that has masters
    assert "not that of MasterWeightsPrecision" in choice.reason
    assert dict(recommend("H100", goal="inference").trainer)["precision"] == "bf16-true"
    assert dict(recommend("T4", goal="inference").trainer)["precision"] == "16-true"
    assert recommend("T4", goal="inference").plugins == ()
    tiny = recommend("A100", model="300K").choice("precision")
    assert tiny.value == "32-true"
    assert "16 bit does not pay" in tiny.reason


def test_accumulation_reaches_the_batch_with_micro_batches_that_fit():
    answer = recommend("A100", model=LLAMA_8B, gpus=16, tokens_per_step="4M")
    most = int(answer.choice("micro-batch").value.split()[2])
    words = answer.choice("accumulation").reason.split()
    each, micro_batches = int(words[words.index("With") + 1]), int(words[words.index("these") + 2].rstrip(";"))
    assert each <= most
    assert each * micro_batches * 16 * 4096 == pytest.approx(4e6, rel=0.1)
    assert answer.callbacks[-1].python() == "AccumulationScheduler(target_tokens=4000000)"


@pytest.mark.parametrize("chip", known_chips(), ids=lambda chip: chip.name)
def test_generations_agree_with_the_formats_of_the_datasheets(chip):
    generation, formats = chip.generation, named_device(chip.name).formats
    assert ("bf16" in formats) == (generation not in ("Volta", "Turing"))
    if generation != "AMD Instinct":
        assert ("fp8" in formats) == (generation in ("Ada", "Hopper", "Blackwell", "Blackwell RTX"))


@pytest.mark.parametrize(
    ("name", "capability", "generation", "precision"),
    [
        ("Tesla T4", (7, 5), "Turing", "16-mixed"),
        ("NVIDIA GeForce GTX 1080", (6, 1), "before Volta", "32-true"),
        ("NVIDIA RTX A2000", (8, 6), "Ampere", "bf16-mixed"),
        ("NVIDIA Thor", (11, 0), "Blackwell", "bf16-mixed"),
    ],
)
def test_without_a_name_torch_is_asked(monkeypatch, name, capability, generation, precision):
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=12_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = find_device()
    assert (found.generation, found.memory_bytes) == (generation, 12_000_000_000)
    assert recommend().choice("precision").value == precision
