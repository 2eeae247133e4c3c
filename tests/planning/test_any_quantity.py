"""Promise: a planning function reads quantities as people write them, and refuses in words what is none."""

import inspect
import traceback
from pathlib import Path
from typing import Any

import pytest

import lightning_mp
from lightning_mp import planning
from lightning_mp.planning import (
    LAWS,
    DecoderConfig,
    DecoderSize,
    ParallelLayout,
    find_chip,
    flops_per_token,
    inference_aware_optimum,
    known_chips,
    peak_flops,
    run_time,
    tokens_for,
    training_flops,
)

CONFIG = DecoderConfig(layers=2, width=64, vocabulary=256)
SIZE = DecoderSize.of(10**6, layers=2, width=64, vocabulary=256)
LAW = LAWS["besiroglu"]
#: Calls that work. Those of ``draw_fit``, ``fit_scaling_law`` and ``read_runs`` are about files and runs.
CALLS: dict[str, dict[str, Any]] = {
    "bubble_fraction": {"stages": 2, "micro_batches": 4},
    "choose_chips": {"config": CONFIG, "gpus": 1},
    "choose_layouts": {"config": CONFIG, "gpus": 2},
    "communication_per_step": {"size": SIZE, "layout": ParallelLayout(copies=2), "tokens_per_micro_batch": 1024},
    "compute_optimal": {"flops": 1e20},
    "decoder_memory": {"config": CONFIG, "context_tokens": 128},
    "find_chip": {"device_name": "h100"},
    "find_machine": {"name": "DGX H100"},
    "flops_per_token": {"parameters": 100, "layers": 2, "width": 8, "context_tokens": 8},
    "inference_aware_optimum": {"law": LAW, "parameters": 1e9, "tokens": 2e10, "inference_tokens": 1e12},
    "largest_micro_batch": {
        "config": CONFIG,
        "layout": ParallelLayout(),
        "memory_bytes": 8e10,
        "context_tokens": 128,
        "precision": "bf16-mixed",
    },
    "model_flops_utilization": {"tokens_per_second": 1e5, "flops_per_token": 1e8, "peak_flops_per_second": 1e15},
    "peak_flops": {"device_name": "h100", "dtype": "bf16"},
    "plan_parallelism": {
        "size": SIZE,
        "layout": ParallelLayout(copies=2),
        "machine": "DGX H100",
        "tokens_per_step": 2**20,
        "context_tokens": 1024,
    },
    "run_time": {"flops": 1e21, "device": "h100"},
    "tokens_for": {"parameters": 10**6},
    "training_flops": {"parameters": 1e6, "tokens": 1e8},
    "training_run": {"parameters": 1e9, "tokens": 2e10},
    "usual_layouts": {"gpus": 8, "gpus_per_node": 8, "layers": 2},
}
ABOUT_FILES = {"draw_fit", "fit_scaling_law", "read_runs"}
NAMES = {"device_name", "device", "name", "dtype"}
NEVER = [-1, float("nan"), "x", "nan", [], b"x", object()]
ODD = [*NEVER, None, True, 0, 2.5, float("inf")]


def quantities(function: Any) -> list[inspect.Parameter]:
    return [
        parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name in NAMES or any(word in str(parameter.annotation) for word in ("int", "float", "Quantity"))
    ]


def test_every_public_function_is_looked_at() -> None:
    functions = {name for name in planning.__all__ if inspect.isfunction(getattr(planning, name))}
    assert functions - ABOUT_FILES == CALLS.keys()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_quantity_is_taken_or_refused_in_words(name: str) -> None:
    function, home = getattr(planning, name), str(Path(lightning_mp.__file__).resolve().parents[1])
    for parameter in quantities(function):
        for value in ODD:
            if value is None and parameter.default is None:
                continue
            refusal, answer = None, None
            try:
                answer = function(**CALLS[name] | {parameter.name: value})
            except ValueError as error:
                refusal = error
            if refusal is not None:
                assert traceback.extract_tb(refusal.__traceback__)[-1].filename.startswith(home)
                assert len(str(refusal)) > 20
            elif (name, answer) != ("find_chip", None):
                assert not any(value is one for one in NEVER), f"{parameter.name}={value!r} gave {answer}"


def test_quantities_are_read_as_they_are_written() -> None:
    assert tokens_for("7B") == tokens_for(7e9) == 140_000_000_000
    assert training_flops("7B", "1T") == 6 * 7e9 * 1e12
    assert flops_per_token("7B", convention="6N") == 42_000_000_000
    assert run_time("1EFLOP", device="h100", gpus="8", mfu="40%") == run_time(1e18, device="h100", gpus=8, mfu=0.4)
    written = inference_aware_optimum(LAW, parameters="1B", tokens="20B", inference_tokens="1T")
    assert written == inference_aware_optimum(LAW, parameters=1e9, tokens=20e9, inference_tokens=1e12)


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        *(("h100", "H100 SXM"), ("h100-pcie", "H100 PCIe"), ("4090", "RTX 4090"), ("v100", "V100 SXM2"), ("rtx", None)),
        *(("H100 PCIe", "H100 PCIe"), ("rtx_a6000", "RTX A6000"), ("TITAN-RTX", "TITAN RTX")),
    ],
)
def test_one_lookup_of_chips_for_all_functions(name: str, chip: str | None) -> None:
    found = find_chip(name)
    assert (found and found.name) == chip
    if found is not None:
        assert peak_flops(name, "fp16") == run_time(1.0, device=name, dtype="fp16").peak_flops_per_second
    assert find_chip("NVIDIA H100") is None  # as torch names several chips, so that it is none
    assert all(find_chip(each.name) is each for each in known_chips())
