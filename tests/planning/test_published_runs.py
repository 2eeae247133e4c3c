"""Plans against published models and runs: parameters of configurations, compute and device hours of runs."""

import json
import warnings
from pathlib import Path

import pytest

from lightning_mp.__main__ import main
from lightning_mp.planning import DecoderConfig, run_time, training_run

# The fields of published config.json files that tell a shape. Gemma and Falcon are tied, and do not tell.
CONFIGS = json.loads((Path(__file__).resolve().parents[1] / "support" / "published_configs.json").read_text())
LLAMA_3_8B, DEEPSEEK_V3 = CONFIGS["llama_3_8b"], CONFIGS["deepseek_v3"]


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [
        ("llama_3_8b", 8.03, None),
        ("qwen_2_7b", 7.615, None),
        ("qwen_3_30b_a3b", 30.53, 3.35),
        ("mixtral_8x7b", 46.7, 12.9),
        ("deepseek_v3", 671.0, 37.5),  # its report says 37
        ("deepseek_v2_lite", 15.7, 2.66),  # 2.4 without the token table
        ("llama_4_scout", 107.8, 17.2),  # 109 with the vision encoder
        ("gpt_oss_20b", 20.9, 4.19),  # 3.6 without the token table
        ("gemma_2b", 2.506, None),
        ("phi_2", 2.78, None),
        ("phi_3_mini", 3.82, None),
        ("falcon_7b", 6.92, None),
        ("gpt_neox_20b", 20.55, None),
    ],
)
def test_a_configuration_has_the_parameters_of_its_model_card(config, billions, active_billions):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shape = DecoderConfig.from_hugging_face(CONFIGS[config])
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert shape.active_parameters / 1e9 == pytest.approx(active_billions or billions, rel=0.005)


def test_layers_of_a_mixture_that_are_dense():
    maverick = CONFIGS["llama_4_scout"] | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
    shape = DecoderConfig.from_hugging_face(maverick)
    assert (shape.dense_layers, shape.dense_ffn_width, shape.shared_ffn_width) == (24, 16384, 8192)
    assert shape.parameters / 1e9 == pytest.approx(400, rel=0.005)  # its model card
    sparse = DecoderConfig.from_hugging_face(
        CONFIGS["qwen_3_30b_a3b"] | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    )
    assert sparse.dense_layers == 25


def test_routed_experts_of_deepseek():
    shape = DecoderConfig.from_hugging_face(DEEPSEEK_V3)
    assert shape.routed_weights == 58 * 256 * 3 * 7168 * 2048


def test_latent_attention_saves_what_its_heads_and_its_small_vectors_hold():
    """Of one token and block in 2 bytes: 128 heads of 2 x (192 + 128) numbers, and the two vectors twice."""
    shape = DecoderConfig.from_hugging_face(DEEPSEEK_V3)
    norms = 2 * (2 + 2) * 7168
    attention = 2 * (128 * 2 * (192 + 128) + 2 * (512 + 1536))
    mlp = 2 * 4 * ((58 * 9 * 2048 + 3 * 18432) / 61)
    assert shape.saved_bytes_per_token(2, 2) == pytest.approx(norms + attention + mlp)


def test_an_unknown_kind_of_model_is_warned_about(capsys):
    Path("config.json").write_text(json.dumps(LLAMA_3_8B | {"model_type": "mine"}))
    with pytest.warns(UserWarning, match="model_type 'mine' is not known. Its MLPs are assumed to be gated"):
        DecoderConfig.from_hugging_face("config.json")
    assert main(["plan", "--config", "config.json", "--tokens", "1T"]) == 0
    assert "warning: model_type 'mine' is not known" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*times outside the models")  # such runs are
@pytest.mark.parametrize(
    ("run", "flops", "chip", "device_hours"),
    [
        ({"parameters": "174.6B", "tokens": "300B"}, 3.14e23, None, None),  # GPT-3: Brown et al. 2020, table D.1
        ({"parameters": "70B", "tokens": "1.4T"}, 5.76e23, None, None),  # Chinchilla: Hoffmann et al. 2022, table A3
        (
            {"parameters": "405B", "tokens": "15.6T"},
            3.8e25,
            "h100",
            30.84e6,
        ),  # Llama 3.1: Dubey et al. 2024, model card
        ({"parameters": "6.74B", "tokens": "2T"}, None, "a100", 184_320),  # Llama 2: Touvron et al. 2023, table 2
        ({"parameters": "69B", "tokens": "2T"}, None, "a100", 1_720_320),
        ({"parameters": "65.2B", "tokens": "1.4T"}, None, "a100", 1_022_362),  # LLaMA: Touvron et al. 2023, table 15
    ],
)
def test_compute_and_device_hours_are_those_of_published_runs(run, flops, chip, device_hours):
    planned = training_run(**run, law="rule-of-20")
    if flops is not None:
        assert planned.flops == pytest.approx(flops, rel=0.025)
    if chip is not None:
        fastest, slowest = run_time(planned.flops, device=chip).gpu_hours
        assert fastest < device_hours < slowest
