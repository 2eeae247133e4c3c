"""Peak rates: dense, sourced, and never guessed for an unknown chip."""

import csv
import re
from importlib import resources

import pytest
import torch

from lightning_mp.planning import Chip, find_chip, known_chips, peak_flops

# What torch.cuda.get_device_name() says, and the chip that it means.
DEVICE_NAMES = {
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A10": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
}
# Relatives with another peak, and chips of which no datasheet figure was taken over.
UNKNOWN_NAMES = [
    "NVIDIA A10G",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GB200",
    "cpu",
    "",
]
BF16_TO_FP8 = 2.0


def by_name(chip: Chip) -> str:
    return chip.name


@pytest.mark.parametrize(("device_name", "chip_name"), DEVICE_NAMES.items())
def test_device_names_find_their_chip_and_no_other(device_name: str, chip_name: str) -> None:
    assert [chip.name for chip in known_chips() if chip.matches(device_name)] == [chip_name]


def test_every_chip_is_reached_by_a_device_name_and_by_its_short_name() -> None:
    assert {chip.name for chip in known_chips()} == set(DEVICE_NAMES.values())
    for chip in known_chips():
        assert find_chip(chip.name.lower()) is chip


@pytest.mark.parametrize("device_name", UNKNOWN_NAMES)
def test_an_unknown_chip_says_so_and_names_the_known_ones(device_name: str) -> None:
    assert find_chip(device_name) is None
    expected = re.escape(f"No peak FLOP/s are known for the device {device_name!r}")
    with pytest.raises(ValueError, match=expected + r".*Known chips: V100 SXM2, .*RTX 4090\."):
        peak_flops(device_name, "bf16")


@pytest.mark.parametrize(
    ("device_name", "dtype", "tflops"),
    [
        ("Tesla T4", torch.float16, 65),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),  # 624 is with sparsity
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),  # Lightning 2.6.6 answers 1978.8
        ("NVIDIA H200", "bf16", 989.5),  # Lightning 2.6.6 answers None
        ("NVIDIA L40S", "bf16", 362.05),  # Lightning 2.6.6 answers the L4's 121
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA H100 80GB HBM3", torch.float8_e5m2, 1978.9),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),  # with fp32 accumulation
    ],
)
def test_published_dense_peaks(device_name: str, dtype: str | torch.dtype, tflops: float) -> None:
    assert peak_flops(device_name, dtype) == pytest.approx(tflops * 1e12, rel=1e-12)


@pytest.mark.parametrize("chip", known_chips(), ids=by_name)
def test_rates_of_a_chip_are_consistent(chip: Chip) -> None:
    """Tensor cores double their rate from one width to the next; a sparse figure in one column breaks the ratio."""
    rates = chip.peak_flops
    if "bf16" in rates:
        assert rates["bf16"] == rates["fp16"]
        # Half the 16-bit rate, or the plain fp32 rate where that is all the datasheet gives (L40).
        assert rates["tf32"] == pytest.approx(rates["bf16"] / 2, rel=0.03)
    if "fp8" in rates:
        assert rates["fp8"] == pytest.approx(rates["bf16"] * BF16_TO_FP8, rel=0.03)
    assert rates["fp32"] <= rates["fp16"]


def test_every_row_has_a_source() -> None:
    text = resources.files("lightning_mp.planning").joinpath("peak_flops.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        assert re.search(r"NVIDIA .*(datasheet|whitepaper).*https://", row["source"]), row["chip"]
        assert None not in row  # as many fields as the header
        assert None not in row.values()


def test_a_format_without_a_figure_says_which_are_known() -> None:
    with pytest.raises(ValueError, match=r"No tf32 peak is known for V100 SXM2\. Known for it: fp32, fp16\."):
        peak_flops("Tesla V100-SXM2-32GB", "tf32")
    with pytest.raises(ValueError, match=r"No fp64 peak is known for A10\. Known for it: fp32, tf32, bf16, fp16\."):
        peak_flops("NVIDIA A10", torch.float64)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown number format 'int8'"):
        peak_flops("NVIDIA A10", "int8")
