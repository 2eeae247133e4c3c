"""Memory of decoders by formulas: published parameters, bytes and savings, and what a measured module keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_models import VOCABULARY, WIDTH, Decoder

from lightning_mp import estimate_memory
from lightning_mp.__main__ import main
from lightning_mp.planning import (
    DecoderConfig,
    ParallelLayout,
    choose_layouts,
    decoder_memory,
    find_machine,
    inference_aware_optimum,
    known_chips,
    run_time,
    training_run,
)
from lightning_mp.planning.scaling_laws.scaling_law import LAWS

LLAMA_2_7B = DecoderConfig(layers=32, width=4096, heads=32, ffn_width=11008, vocabulary=32000)
LLAMA_3_405B = DecoderConfig(layers=126, width=16384, heads=128, kv_heads=8, ffn_width=53248, vocabulary=128256)
MIXTRAL_8X7B = DecoderConfig(
    layers=32, width=4096, heads=32, kv_heads=8, ffn_width=14336, vocabulary=32000, experts=8, active_experts=2
)
STATES = ("weights", "gradients", "masters", "optimizer states")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_2_7B, 6_738_415_616), (LLAMA_3_405B, 405_853_388_800), (MIXTRAL_8X7B, 46_702_792_704)],
)
def test_parameters_are_those_of_the_published_checkpoints(config, parameters):
    assert config.parameters == parameters


def test_a_token_of_a_mixture_meets_two_experts():
    assert MIXTRAL_8X7B.active_parameters == pytest.approx(12.9e9, rel=0.002)  # Jiang et al. 2024, arXiv:2401.04088


def test_states_of_zero_are_those_of_its_first_figure():
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs, 120 GB whole and 1.9 GB in shards."""
    config = DecoderConfig(layers=36, width=4096, vocabulary=51200, gated=False, tied_head=True)
    layouts = [ParallelLayout(copies=64), ParallelLayout(shards=64)]
    for layout, gigabytes in zip(layouts, (120, 1.9), strict=True):
        parts = decoder_memory(config, layout, context_tokens=1, precision="16-true").bytes_by_part
        states = sum(parts[name] for name in STATES)
        assert states / config.parameters * 7.5 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("tensor", "sequence", "bytes_per_width"), [(1, False, 34), (8, False, 13), (8, True, 4.25)])
def test_a_block_saves_the_published_bytes_per_token(tensor, sequence, bytes_per_width):
    """Korthikanti et al. 2022, equations 1, 2 and 4 without the scores of attention: 34, 10 + 24 / t and 34 / t."""
    gpt3 = DecoderConfig(layers=96, width=12288, heads=96, vocabulary=50257, gated=False, dropout=True)
    saved = gpt3.saved_bytes_per_token(2, 2, tensor=tensor, sequence_parallel=sequence)
    assert saved == bytes_per_width * 12288


def test_a_pipeline_holds_as_many_micro_batches_as_it_has_stages():
    def activations(**arguments):
        layout = ParallelLayout(stages=8)
        return decoder_memory(LLAMA_2_7B, layout, context_tokens=4096, **arguments).bytes_by_part["activations"]

    ends = 4 * 4 * 4096 * 4096  # what the first and the last stage save outside of blocks, at most
    one = decoder_memory(LLAMA_2_7B, context_tokens=4096).bytes_by_part["activations"] - ends
    assert activations() - ends == one
    assert activations(micro_batches=2) - ends == one / 4


def test_recomputed_blocks_keep_their_inputs_only():
    kept, again = (
        decoder_memory(LLAMA_2_7B, ParallelLayout(checkpointed=c), sequences=4, context_tokens=4096)
        for c in (False, True)
    )
    assert again.bytes_by_part["activations"] < 0.15 * kept.bytes_by_part["activations"]


def test_formulas_agree_with_the_measured_step_of_a_module():
    """A decoder of two blocks; it repeats keys until they are as wide as queries, which the formula does not do."""
    module = Decoder()
    ids = torch.zeros(4, 32, dtype=torch.long)
    config = DecoderConfig(
        layers=2, width=WIDTH, heads=4, kv_heads=2, ffn_width=4 * WIDTH, vocabulary=VOCABULARY, gated=False
    )
    formula = decoder_memory(config, sequences=4, context_tokens=32, precision="bf16-true").bytes_by_part
    estimate = estimate_memory(module, ids, precision="bf16-true")
    for part in STATES:
        largest = max(sample.bytes_by_part.get(part, 0) for sample in estimate.samples)
        assert formula[part] == pytest.approx(largest, rel=0.05)
    saved = estimate.end_of_forward.bytes_by_part["activations"]
    assert formula["activations"] == pytest.approx(saved, rel=0.25)


def test_every_chip_with_a_peak_has_a_memory():
    assert [chip.name for chip in known_chips() if not chip.memory_bytes] == []


def test_layouts_that_do_not_fit_come_last():
    choices = choose_layouts(LLAMA_2_7B, 64, machine=find_machine("DGX H100"), memory_bytes=80e9)
    verdicts = [choice.verdict for choice in choices]
    assert verdicts == sorted(verdicts, key=("fits", "may fit", "does not fit").index)
    assert {"fits", "does not fit"} <= set(verdicts)
    assert choices[-1].layout == ParallelLayout(copies=64)
    assert all((choice.largest_micro_batch > 0) == (choice.verdict == "fits") for choice in choices)
    nothing = choose_layouts(LLAMA_3_405B, 8, machine=find_machine("DGX H100"), memory_bytes=80e9)
    assert {choice.verdict for choice in nothing} == {"does not fit"}
    assert nothing[0].layout.copies == 1, "whole copies are the worst of what does not fit"


def test_inference_makes_a_smaller_model_pay():
    """Sardana et al. 2024, figure 1: 13B and 2T tokens of inference; a 7B model saves 1.7e22 operations, 17%."""
    law = replace(LAWS["hoffmann-3"], E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283)  # as in the paper, section 2
    _, tokens = law.frontier.optimum(law.frontier.flops_for_parameters(13e9))
    best = inference_aware_optimum(law, parameters=13e9, tokens=tokens, inference_tokens=2e12)
    assert best.parameters == pytest.approx(7e9, rel=0.01)
    assert best.lifetime_flops_before - best.lifetime_flops == pytest.approx(1.7e22, rel=0.01)
    assert best.saving == pytest.approx(0.17, abs=0.005)
    assert law.loss(best.parameters, best.tokens) == pytest.approx(law.loss(13e9, tokens))
    none = inference_aware_optimum(law, parameters=13e9, tokens=tokens, inference_tokens=0)
    assert none.parameters == pytest.approx(13e9, rel=1e-3)


def test_two_numbers_of_a_run_make_the_third():
    runs = [
        training_run(parameters=1e9, tokens=2e10),
        training_run(parameters=1e9, flops=1.2e20),
        training_run(tokens=2e10, flops="0.12ZFLOP"),
    ]
    for run in runs:
        assert (run.parameters, run.tokens, run.flops) == pytest.approx((1e9, 2e10, 1.2e20))
        assert run.loss == pytest.approx(LAWS["besiroglu"].loss(1e9, 2e10))
        assert run.optimum.loss <= run.loss


def test_time_is_a_range_where_no_mfu_was_measured():
    time = run_time(1e21, device="h100", gpus=8, price=2)
    assert time.mfu == (0.5, 0.3)
    assert time.hours[0] == pytest.approx(1e21 / (0.5 * 989.4e12) / 3600 / 8)
    assert time.cost == pytest.approx([2 * hours for hours in time.gpu_hours])
    assert (time.dtype, run_time(1e21, device="RTX4090").chip) == ("bf16", "RTX 4090")
    assert run_time(1e21, device="v100").dtype == "fp16", "it has no bf16 units"
    assert run_time(1e21, device="h100", mfu="40%").hours[0] == run_time(1e21, device="h100", mfu=0.4).hours[1]


def test_a_configuration_of_hugging_face_is_read_from_its_file():
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    Path("config.json").write_text(json.dumps({**shape, "vocab_size": 32000, "model_type": "llama"}))
    assert DecoderConfig.from_hugging_face("config.json") == LLAMA_2_7B
    Path("config.json").write_text("layers: 3")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON file"):
        DecoderConfig.from_hugging_face("config.json")


def test_a_sequence_longer_than_learned_positions_is_refused(capsys):
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    Path("config.json").write_text(json.dumps(gpt2))
    with pytest.raises(ValueError, match=r"`context_tokens` \(2048\) is more than the 1,024 positions that this model"):
        decoder_memory(DecoderConfig.from_hugging_face("config.json"), context_tokens=2048)
    for verb in ("plan --device h100", "plan --tokens 1B", "memory", "advise --device h100"):
        words = [*verb.split(), "--config", "config.json"]
        assert main(words) == 0, "the length that the model has is taken where none is given"
        with pytest.raises(SystemExit):
            main([*words, "--context", "2048"])
        assert "--context (2048) is more than the 1,024 positions" in capsys.readouterr().err
