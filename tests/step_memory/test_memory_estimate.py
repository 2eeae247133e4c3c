"""Estimates of memory against what real runs with the real plugins keep alive.

Promise: within 5% of the bytes of live tensors, for every kind of model, precision plugin and optimizer.
"""

import itertools
from pathlib import Path

import pytest
import torch
from huggingface_models import gpt2
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from memory_cells import KEPT, OTHERS, PLUGINS, compare_on_one_device, compare_on_ranks, estimate_peak, measure_peaks
from memory_models import MODELS, OPTIMIZERS, Decoder, Project
from small_models import Parts, quiet_trainer
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_mp import AutocastPrecision, MasterWeightsPrecision, estimate_memory
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.training.activation_checkpointing.cost import StepCost

# torch's, once in a process: a norm with fp32 weights takes 16-bit inputs under autocast on the CPU.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
# Every model three times, every plugin and optimizer with each kind; all cells: tests/benchmarks/bench_memory.py.
SUBSET = [
    (model, list(PLUGINS)[(row + 2 * column) % 5], list(OPTIMIZERS)[(row + column) % 4])
    for (row, model), column in itertools.product(enumerate(MODELS), range(3))
    # refused: they have no linear layer
    if (model, list(PLUGINS)[(row + 2 * column) % 5])
    not in (("u-net", "fp8-mixed"), ("three channels out", "fp8-mixed"))
]
ROWS = torch.zeros(64, 64)


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


POLICY = {"op:norms": "fp32", "*.up": "fp32"}
WITH_POLICY = {
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed", policy=POLICY),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true", policy=POLICY),
}


def check(rows):
    kept = {row.what: (row.estimated, row.measured) for row in rows if row.what in KEPT}
    assert all(estimated == measured for estimated, measured in kept.values()), kept
    assert {row.what: row.error for row in rows if abs(row.error) > 0.05} == {}


QUICK = [
    ("mlp", "bf16-true+remainder", "AdamW"),
    ("mlp", "bf16-true+remainder", "fused AdamW"),  # fp32 gradients and whole masters for the step
    ("mlp", "bf16-true+24bit", "fused AdamW"),
    ("mlp", "bf16-true", "fused AdamW"),
    ("decoder", "bf16-mixed", "SGD with momentum"),
    ("checkpointed decoder", "bf16-mixed", "AdamW"),
    ("recurrent", "cached casts", "AdamW"),
    ("gru", "32-true", "AdamW"),
    ("checkpointed decoder", "cached casts", "AdamW"),
]


@pytest.mark.full
@pytest.mark.parametrize("cell", QUICK)
def test_an_estimate_is_within_5_percent_of_a_real_run(cell):
    check(compare_on_one_device(cell, PLUGINS | OTHERS))


@pytest.mark.full
@pytest.mark.parametrize("cell", SUBSET)
def test_estimates_are_within_5_percent_for_all_models_and_plugins(cell):
    check(compare_on_one_device(cell, PLUGINS | OTHERS))


@pytest.mark.full
@pytest.mark.parametrize("plugin", WITH_POLICY)
def test_rules_of_a_policy_change_the_estimate_as_they_change_the_run(plugin):
    check(compare_on_one_device(("decoder", plugin, "AdamW"), WITH_POLICY))


def grouped_queries(kv_heads):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=kv_heads, **sizes))


def saved_by_a_real_forward(model, batch):
    cost = StepCost(model, batch)
    cost.begin()
    loss = model(**batch).loss
    cost.end_forward()
    loss.backward()
    cost.end()
    return cost.report().saved_bytes


@pytest.mark.full
def test_what_a_hugging_face_model_saves_is_what_a_real_forward_saves():
    """A mask is saved in each layer, and with it keys and values are repeated, only for a batch that has padding."""
    ids = torch.arange(48).view(2, 24) % 31
    padding = torch.ones_like(ids)
    padding[0, 20:] = 0
    masks = {"no mask": {}, "a mask without padding": {"attention_mask": torch.ones_like(ids)}}
    masks |= {"padding": {"attention_mask": padding}, "no cache": {"use_cache": False}}
    models = {"gpt2": gpt2()} | {f"{kv_heads} key heads": grouped_queries(kv_heads) for kv_heads in (8, 4, 2, 1)}
    found = {}
    for (name, model), (kind, mask) in itertools.product(models.items(), masks.items()):
        batch = {"input_ids": ids, "labels": ids, **mask}
        estimate = estimate_memory(model, batch, device_type="cpu")
        found[name, kind] = estimate.saved_bytes / saved_by_a_real_forward(model, batch)
    assert found == dict.fromkeys(found, 1.0)


ON_RANKS = {
    "ddp": [("decoder", "bf16-mixed", "AdamW"), ("adapters", "16-mixed", "RMSprop")],
    "fsdp2": [
        ("decoder", "bf16-mixed", "AdamW"),
        ("tied decoder", "bf16-true", "SGD with momentum"),
        ("batch norm", "fp8-mixed", "RMSprop"),
        ("mlp", "bf16-true+remainder", "AdamW"),
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ON_RANKS)
def test_ranks_hold_what_is_estimated(strategy):
    for cell, rows in compare_on_ranks(ON_RANKS[strategy], strategy).items():
        assert {row.what: row.error for row in rows if abs(row.error) > 0.05} == {}, cell


def test_ddp_keeps_gradients_a_second_time_unless_they_are_views_of_its_buckets():
    one = estimate_memory(net(), ROWS)
    buckets = estimate_memory(net(), ROWS, strategy="ddp", ranks=4)
    views = estimate_memory(net(), ROWS, strategy="ddp", ranks=4, gradient_as_bucket_view=True)
    whole = 4 * 3 * (64 * 64 + 64)
    assert buckets.peak_bytes - one.peak_bytes == whole
    # They are cleared, but not freed; in backward one at a time comes on top, as in a window.
    window = estimate_memory(net(), ROWS, accumulate_grad_batches=4)
    outside = [sample.bytes_by_part for sample in views.samples if sample.phase != "backward"]
    assert {parts.get("gradients", 0) + parts["communication buffers"] for parts in outside} == {whole}
    assert buckets.peak_bytes > views.peak_bytes == window.peak_bytes > one.peak_bytes
    both = estimate_memory(
        net(), ROWS, strategy="ddp", ranks=4, gradient_as_bucket_view=True, accumulate_grad_batches=4
    )
    assert both.peak_bytes == window.peak_bytes + whole, "micro-batches that reduce nothing have no views"


def test_the_window_is_that_of_the_trainer_that_the_module_is_attached_to():
    module = BoringModel()
    module.trainer = quiet_trainer(accumulate_grad_batches=4)
    batch = torch.ones(2, 32)
    assert (
        estimate_memory(module, batch).peak_bytes
        == estimate_memory(module, batch, accumulate_grad_batches=2).peak_bytes
    )
    assert (
        estimate_memory(module, batch).peak_bytes > estimate_memory(module, batch, accumulate_grad_batches=1).peak_bytes
    )


REAL = [
    ("decoder", "bf16-mixed", "fused AdamW", "single", 4),
    ("u-net", "bf16-mixed", "foreach AdamW", "single", 1),
    ("decoder", "bf16-true+remainder", "schedule-free", "single", 1),
    ("three channels out", "32-true", "fused AdamW", "single", 1),
    ("batch norm", "fp32_gradients", "fused AdamW", "single", 4),
    ("encoder-decoder", "bf16-true+24bit", "schedule-free", "single", 4),
    ("encoder-decoder", "32-true", "schedule-free", "single", 4),
    ("frozen", "16-mixed", "Muon", "single", 1),
    ("adapters", "fp8-mixed", "Adagrad", "single", 4),
]


@pytest.mark.parametrize("cell", REAL[:4])
def test_the_peak_is_that_of_the_allocator(cell):
    """Every cell: tests/benchmarks/bench_memory.py."""
    [measured] = measure_peaks([cell])
    assert -0.01 <= estimate_peak(cell) / measured - 1 <= 0.05


@pytest.mark.full
@pytest.mark.parametrize("cell", REAL[4:])
def test_the_peak_of_other_setups_is_that_of_the_allocator(cell):
    [measured] = measure_peaks([cell])
    assert -0.01 <= estimate_peak(cell) / measured - 1 <= 0.05


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "ddp, views", "fsdp2"])
def test_the_peak_on_two_ranks_is_that_of_the_allocator(strategy):
    cells = [("decoder", "bf16-mixed", "fused AdamW", strategy, window) for window in (1, 4)]
    for cell, measured in zip(cells, measure_peaks(cells), strict=True):
        assert -0.01 <= estimate_peak(cell) / measured - 1 <= 0.05, cell


def test_attention_with_dropout_and_the_loss_of_16_bit_logits_are_those_of_cuda():
    """Fused attention saves no scores; the softmax of the loss reads 16 bit, so no fp32 copy of the logits is made."""

    def attends(dropout):
        def forward(module, x):
            x = module.layer(x).view(2, 4, 64, 8)
            return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

        return Parts(forward, layer=lambda: nn.Linear(32, 32))

    x = torch.zeros(2, 64, 32)
    saved = {d: estimate_memory(attends(0.1), x, device_type=d).saved_bytes for d in ("cuda", "cpu")}
    assert saved["cuda"] == estimate_memory(attends(0.0), x).saved_bytes < saved["cpu"]

    head, labels = nn.Linear(8, 1000, bias=False), torch.zeros(512, dtype=torch.long)

    def loss(module, x):
        return F.cross_entropy(module(x), labels)

    logits = 512 * 1000
    peak = estimate_memory(head, torch.zeros(512, 8), loss, precision="bf16-mixed", optimizer="SGD").peak
    assert peak.phase == "backward"
    # log-probabilities in fp32, their gradient, and that of the logits in bf16
    assert 10 * logits <= peak.total_bytes - peak.bytes_by_part["workspaces"] < 10.5 * logits


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("optimizer", ["schedule-free", "Adagrad", "Muon"])
def test_states_are_those_of_the_optimizer_whoever_makes_them(optimizer):
    estimate = estimate_memory(Project("mlp", optimizer), MODELS["mlp"][1]())
    real = Project("mlp", optimizer)
    [made] = [real.configure_optimizers()]
    real.train()
    if hasattr(made, "train"):
        made.train()
    real.training_step(MODELS["mlp"][1](), 0).backward()
    made.step()
    states = [tensor for state in made.state.values() for tensor in tensors_in(dict(state))]
    assert estimate.end_of_forward.bytes_by_part["optimizer states"] == sum(tensor.nbytes for tensor in states)


def test_an_8_bit_step_compiled_for_a_cpu_widens_both_moments_of_one_parameter():
    """Against a real run: the cells with "8-bit" of tests/benchmarks/bench_memory.py."""
    estimate = estimate_memory(net(), ROWS, optimizer=OPTIMIZERS["8-bit"], device_type="cpu")
    assert estimate.samples[-1].phase == "optimizer step"
    assert estimate.samples[-1].bytes_by_part["temporaries"] == 2 * 4 * 64 * 64


def test_under_fsdp2_weights_that_are_gathered_in_fp32_are_cast_at_each_use():
    """A GRU's at each time step: they are no layer's that FSDP2 gathers in 16 bit."""
    module, batch = Project("gru", "fused AdamW"), MODELS["gru"][1]()
    one, sharded = (
        estimate_memory(module, batch, precision="bf16-mixed", **arguments).saved_bytes
        for arguments in ({}, {"strategy": "fsdp2", "ranks": 2})
    )
    linear = sum(p.numel() for name, p in module.named_parameters() if "head" in name)
    assert one - 2 * linear <= sharded <= one


@pytest.mark.full
class Hooked(BoringModel):
    def on_before_zero_grad(self, optimizer):
        """May read the last step's gradients."""


@pytest.mark.parametrize(
    ("precision", "module", "frees"),
    [
        ("bf16-mixed", BoringModel, True),
        ("bf16-true", BoringModel, True),
        (AutocastPrecision("bf16-mixed"), BoringModel, True),
        (MixedPrecision("bf16-mixed", "cpu"), BoringModel, False),
        ("32-true", BoringModel, False),
        ("lightning:bf16-true", BoringModel, False),
        ("bf16-mixed", Hooked, False),
    ],
)
def test_the_last_steps_gradients_live_through_the_forward_where_nothing_frees_them(precision, module, frees):
    end = estimate_memory(module(), torch.zeros(4, 32), precision=precision).end_of_forward
    width = 2 if precision == "lightning:bf16-true" else 4
    assert end.bytes_by_part.get("gradients", 0) == (0 if frees else width * (32 * 2 + 2))


def test_fsdp2_gathers_one_unit_at_a_time_and_in_backward_the_next_one_beside_it():
    """A block has 5 layers; in bf16-mixed its products are gathered in 2 bytes, norms and the token table in 4."""
    estimate = estimate_memory(
        Decoder(), MODELS["decoder"][1](), precision="bf16-mixed", strategy="fsdp2", ranks=4, units="blocks.*"
    )
    block = 2 * (3 * (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64))
    norms, table, head = 4 * 3 * 64, 4 * 96 * 64, 2 * 96 * 64
    gathered = [sample.bytes_by_part.get("gathered weights", 0) for sample in estimate.samples]
    assert max(gathered) == table + block + norms
    assert {table, table + block, table + head} <= set(gathered)
    assert gathered[-1] == 0
    buffers = [s.bytes_by_part.get("communication buffers", 0) for s in estimate.samples if s.phase == "backward"]
    reduced = 4 * (block // 2)
    # What was reduced last, the shards that it becomes, and the block that is gathered next.
    assert max(buffers) >= reduced + max(reduced // 4, block)
    shards = sum(4 * -(-p.shape[0] // 4) * p[0].numel() for p in Decoder().parameters())
    end = estimate.end_of_forward.bytes_by_part
    assert end["weights"] == shards
    assert estimate.samples[-1].bytes_by_part["gradients"] == shards


@pytest.mark.parametrize("sync", ["micro_batch", "window"])
def test_fsdp2_sums_gradients_of_a_window_on_shards_or_whole(sync):
    arguments = {"strategy": "fsdp2", "ranks": 4, "units": "*", "sync": sync}
    window = estimate_memory(net(), ROWS, accumulate_grad_batches=4, **arguments)
    whole = 4 * 3 * (64 * 64 + 64)
    assert window.end_of_forward.bytes_by_part["gradients"] == (whole // 4 if sync == "micro_batch" else whole)
    assert window.samples[-1].bytes_by_part["gradients"] == whole // 4
    assert estimate_memory(net(), ROWS, **arguments).peak_bytes < window.peak_bytes


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind):
    """Optimizers sum them first, into blocks that fake tensors do not show."""
    with pytest.raises(
        ValueError, match=r"what sums of sparse gradients take\. Measure a step, or pass .* sparse=False"
    ):
        estimate_memory(kind(8, 4, sparse=True), torch.zeros(4, 2, dtype=torch.long), optimizer="SGD")


def test_gradients_of_lent_copies_wait_until_backward_has_ended():
    """Of a window they are there beside those of earlier micro-batches."""
    for fp32, itemsize in ((False, 2), (True, 4)):
        precision = MasterWeightsPrecision("bf16-true", fp32_gradients=fp32)
        estimate = estimate_memory(net(), ROWS, precision=precision, accumulate_grad_batches=2)
        most = max(s.bytes_by_part.get("gradients", 0) for s in estimate.samples if s.phase == "backward")
        elements = 3 * (64 * 64 + 64)
        assert most == (itemsize + 2) * elements


def test_on_a_gpu_autocast_keeps_norms_in_fp32_and_optimizers_work_on_all_tensors_at_once():
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    cpu, cuda = (estimate_memory(module, ROWS, precision="bf16-mixed", device_type=d) for d in ("cpu", "cuda"))
    # The norm gives fp32, which is cast again for the next product; both are saved.
    assert cuda.saved_bytes > cpu.saved_bytes
    step = {
        d: max(s.total_bytes for s in e.samples if s.phase == "optimizer step")
        for d, e in (("cpu", cpu), ("cuda", cuda))
    }
    assert step["cuda"] > step["cpu"]
    assert cuda.reserved_bytes[0] == cuda.peak_bytes < cuda.reserved_bytes[1]
    assert "its allocator was not measured" in str(cuda)
    assert "allocator" not in str(cpu)


@pytest.mark.full
def test_checkpoints_save_activations_and_a_fused_step_has_no_temporaries():
    ids = MODELS["decoder"][1]()
    kept, again = (estimate_memory(Decoder(again=again), ids, precision="bf16-mixed") for again in (False, True))
    assert again.saved_bytes < 0.6 * kept.saved_bytes
    fused = estimate_memory(net(), ROWS, optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    assert {s.bytes_by_part.get("temporaries", 0) for s in fused.samples if s.phase == "optimizer step"} <= {0, 4}


def test_a_model_on_the_meta_device_takes_no_memory_and_does_not_change():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(50_000, 50_000), nn.ReLU(), nn.Linear(50_000, 10))
    estimate = estimate_memory(module, torch.empty(8, 50_000, device="meta"), precision="bf16-true", optimizer="SGD")
    assert estimate.end_of_forward.bytes_by_part["masters"] == 4 * (50_000 * 50_011 + 10)
    assert module[0].weight.grad is None
    assert module[0].weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_the_picture_and_the_table_have_the_same_parts():
    estimate = estimate_memory(net(), ROWS, precision=MasterWeightsPrecision("bf16-true", storage="remainder"))
    estimate.plot("memory.svg")
    assert Path("memory.svg").read_text().startswith("<?xml")
    parts = estimate.peak.bytes_by_part.keys() | estimate.end_of_forward.bytes_by_part.keys()
    assert {line.split("  ")[1] for line in str(estimate).splitlines()[2:-2]} == parts
    with pytest.raises(ValueError, match=r"memory\.doc cannot be drawn: its name must end with one of \.png"):
        estimate.plot("memory.doc")


def test_an_optimizer_that_wants_a_trainer_is_refused_with_what_to_pass():
    class Planned(BoringModel):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.estimated_stepping_batches)

    with pytest.raises(ValueError, match="configure_optimizers of Planned reads self.trainer.*Pass optimizer="):
        estimate_memory(Planned(), torch.ones(2, 32))
    assert estimate_memory(Planned(), torch.ones(2, 32), optimizer="sgd").peak.total_bytes > 0


def test_an_lstm_is_estimated_for_a_gpu_only():
    module = nn.LSTM(8, 8)
    with pytest.raises(ValueError, match="what oneDNN's LSTM keeps on a CPU. Measure a step there, or pass"):
        estimate_memory(module, torch.zeros(2, 2, 8), device_type="cpu")
    assert estimate_memory(module, torch.zeros(2, 2, 8)).saved_bytes > 0


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_hugging_face_mixture_of_experts_is_estimated(precision, device_type):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 211}
    config = MixtralConfig(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, **sizes)
    ids = torch.arange(96).view(2, 48)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    estimate = estimate_memory(model, {"input_ids": ids, "labels": ids}, precision=precision, device_type=device_type)
    elements = sum(p.numel() for p in model.parameters())
    assert estimate.samples[-1].bytes_by_part["gradients"] == (2 if precision == "bf16-true" else 4) * elements
