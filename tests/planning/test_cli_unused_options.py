"""An option that would do nothing is refused in one line, and advice names options that there are."""

import json

import pytest

from lightning_mp.__main__ import main

SHAPE = "--layers 2 --width 256 --vocab 1000"


def refusal(capsys: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"memory {SHAPE} --strategy fsdp2", "--strategy belongs to --module"),
        (f"memory {SHAPE} --device-type cpu", "--device-type belongs to --module"),
        ("memory --module tempfile:gettempdir --context 128", "--context belongs to the shape of a decoder"),
        (
            "memory --module tempfile:gettempdir --tied-head",
            "--tied-head belongs to a shape (--layers, --width, --vocab)",
        ),
        ("compare --module tempfile:gettempdir --params 10k", "--params belongs to the demo's model"),
        ("compare --module tempfile:gettempdir --batch-size 4", "--batch-size belongs to the demo's model"),
        ("compare --seeds 3", "--seeds: there are no paired runs without --steps"),
        ("plan --flops 1e21 --precision 16-mixed", "--precision needs a chip or a model"),
        ("plan --flops 1e21 --context 128", "--context needs a chip or a model"),
        ("plan --flops 1e21 --tied-head", "--tied-head belongs to a shape"),
        ("plan --params 1B --tokens-per-step 1M", "--tokens-per-step needs a chip"),
        (
            "plan --flops 1e21 --tokens 1B --params 1B",
            "pass one of --flops, --params, --tokens, --device-hours and --cost, or two of model (--params or a shape),"
            " --tokens and compute (--flops, --device-hours or --cost), got --flops and --params and --tokens",
        ),
        ("plan", "pass one of --flops, --params, --tokens, --device-hours and --cost, or two of model"),
        (
            "plan --flops 1e21 --device-hours 10 --device h100 --mfu 0.4",
            "got --flops and --device-hours",
        ),
        ("memory --layers 2 --width 100 --heads 3 --vocab 10", "--heads, got 3, or tell --head-width"),
    ],
)
def test_what_would_do_nothing_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, words)


def test_the_width_of_a_head_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "memory",
                "--layers",
                "2",
                "--width",
                "100",
                "--heads",
                "3",
                "--head-width",
                "32",
                "--vocab",
                "10",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["total_bytes"] > 0


@pytest.mark.parametrize("params", ["10k", "1e4", "10_000", "10000"])
def test_the_demo_reads_its_size_as_compare_does(params: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused for its budget, after the size was read."""
    said = refusal(capsys, f"demo --params {params} --tokens-per-parameter 0.01")
    assert "parameters) is smaller than one batch" in said
    assert "9,264 parameters" in said or "10," in said
