"""Peak rates: dense, sourced, and never guessed for an unknown chip."""

import csv
import re
from importlib import resources

import pytest
import torch

from lightning_mp.ground.flops.hardware import matmul_format
from lightning_mp.planning import Chip, find_chip, known_chips, peak_flops

# What torch.cuda.get_device_name() says, and the chip that it means.
DEVICE_NAMES = {
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100S-PCIE-32GB": "V100S PCIe",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-SXM-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA A30": "A30",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A40": "A40",
    "NVIDIA A2": "A2",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA H20": "H20",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA GeForce RTX 2080 Ti": "RTX 2080 Ti",
    "NVIDIA TITAN RTX": "TITAN RTX",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "Quadro RTX 8000": "Quadro RTX 6000",
    "NVIDIA GeForce RTX 3060": "RTX 3060",
    "NVIDIA GeForce RTX 3070": "RTX 3070",
    "NVIDIA GeForce RTX 3080": "RTX 3080",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 Ti",
    "NVIDIA RTX A4000": "RTX A4000",
    "NVIDIA RTX A5000": "RTX A5000",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA GeForce RTX 4070": "RTX 4070",
    "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA GeForce RTX 5080": "RTX 5080",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000 Max-Q",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X VF": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI325X VF": "MI325X",
    "AMD Instinct MI350X": "MI350X",
    "AMD Instinct MI350X VF": "MI350X",
    "AMD Instinct MI355X": "MI355X",
    "AMD Instinct MI355X VF": "MI355X",
}
# Relatives with another peak, and chips of which no datasheet figure was taken over.
UNKNOWN_NAMES = [
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA RTX A4000 Laptop GPU",
    "NVIDIA L40G",
    "NVIDIA H800 PCIe",
    "NVIDIA A40-48Q",
    "AMD Instinct MI300X HF",
    "NVIDIA GeForce RTX 3060 Ti",
    "NVIDIA GeForce RTX 4070 SUPER",
    # No figure that two sources agree on: 96 GB boards with other clocks, a GB10 with 62 to 209 in print, and a server
    # edition with a clock of its own.
    "NVIDIA H100",
    "NVIDIA GB10",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "cpu",
    "",
]
BF16_TO_FP8 = 2.0
# Chips whose figures were entered from their document and not found again elsewhere. A row that is added without
# a second look belongs here, by name.
UNCHECKED = {"MI350X", "MI355X", "RTX 3060", "RTX 4070", "RTX PRO 6000", "RTX PRO 6000 Max-Q"}


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
    where = r".*(Similar: |The known chips are in ).*MFUMonitor\(peak_flops=...\)\."
    with pytest.raises(ValueError, match=expected + where):
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
        ("NVIDIA GH200 480GB", "bf16", 989.5),  # Lightning 2.6.6 answers None
        ("NVIDIA B200", "bf16", 2250),  # Lightning 2.6.6 answers None
        ("NVIDIA B200", "tf32", 1125),  # 18 PFLOPS with sparsity for eight
        ("NVIDIA GB200", "bf16", 2500),  # Lightning 2.6.6 answers None
        ("NVIDIA L40", "bf16", 181.05),  # Lightning 2.6.6 answers the L4's 121
        ("NVIDIA A40", "bf16", 149.7),  # Lightning 2.6.6 answers the fp32 figure
        ("NVIDIA RTX A4000", "bf16", 76.7),  # Lightning 2.6.6 answers the A40's
        ("NVIDIA A10G", "bf16", 70),  # Lightning 2.6.6 answers the A10's
        ("NVIDIA L40S", "bf16", 362.05),  # Lightning 2.6.6 answers the L4's 121
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA H100 80GB HBM3", torch.float8_e5m2, 1978.9),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),  # with fp32 accumulation
        ("NVIDIA GeForce RTX 4090", "fp8", 330.3),  # 660.6 is with fp16 accumulation
        ("NVIDIA TITAN RTX", "fp16", 130.5),  # the full rate with fp32 accumulation, other than the 2080 Ti
        ("AMD Instinct MI355X", "bf16", 256 * 4096 * 2.4e-3),  # 5033 is with sparsity; CUs, operations per clock, GHz
        ("AMD Instinct MI350X VF", "fp8", 256 * 8192 * 2.2e-3),
        ("NVIDIA GeForce RTX 3060", "bf16", 28 * 512 * 1.777e-3),  # 51 is with fp16 accumulation
        ("NVIDIA GeForce RTX 4070", "fp8", 46 * 1024 * 2.475e-3),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),  # 1008 is with sparsity
        ("AMD Instinct MI210", "fp32", 45.3),  # 22.6 is without the matrix cores
        ("AMD Instinct MI250X", "bf16", 191.5),  # 383 is of two dies, which torch sees as two devices
    ],
)
def test_published_dense_peaks(device_name: str, dtype: str | torch.dtype, tflops: float) -> None:
    """D39: dense, and of the very chip."""
    assert peak_flops(device_name, dtype) == pytest.approx(tflops * 1e12, rel=2e-3)


@pytest.mark.parametrize("chip", known_chips(), ids=by_name)
def test_rates_of_a_chip_are_consistent(chip: Chip) -> None:
    """Tensor cores double their rate from one width to the next; a sparse figure in one column breaks the ratio."""
    rates = chip.peak_flops
    if "bf16" in rates:
        assert rates["bf16"] == rates["fp16"]
    if "bf16" in rates and "tf32" in rates:
        # Half the 16-bit rate, or the plain fp32 rate where that is all the datasheet gives (L40).
        assert rates["tf32"] == pytest.approx(rates["bf16"] / 2, rel=0.03)
    if "fp8" in rates:
        assert rates["fp8"] == pytest.approx(rates["bf16"] * BF16_TO_FP8, rel=0.03)
    assert rates["fp32"] <= rates["fp16"]


def test_every_row_has_a_source() -> None:
    text = resources.files("lightning_mp.ground.flops").joinpath("peak_flops.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        assert re.search(r"(NVIDIA|AMD) .*(datasheet|whitepaper).*https://", row["source"]), row["chip"]
        assert None not in row  # as many fields as the header
        assert None not in row.values()


def test_figures_were_looked_up_a_second_time_or_are_listed_by_name() -> None:
    assert {chip.name for chip in known_chips() if not chip.checked} == UNCHECKED
    for chip in known_chips():
        assert re.fullmatch(r"(20\d\d-(0[1-9]|1[0-2]))?", chip.checked), chip.name


@pytest.mark.parametrize(
    ("precision", "tf32", "expected"),
    [
        ("bf16-mixed", False, "bf16"),
        ("bf16-true", True, "bf16"),
        ("16-mixed", False, "fp16"),
        ("16-true", False, "fp16"),
        ("32-true", False, "fp32"),
        ("32-true", True, "tf32"),
        ("64-true", True, "fp64"),
        ("fp8-mixed", False, "fp8"),
        ("transformer-engine", False, "fp8"),
        ("transformer-engine-float16", False, "fp8"),
        ("nf4", False, None),
    ],
)
def test_the_format_behind_a_precision(precision: str, tf32: bool, expected: str | None) -> None:
    """D40: Transformer Engine is not int8, and what a name does not tell is not fp32."""
    assert matmul_format(precision, tf32=tf32) == expected
