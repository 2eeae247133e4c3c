"""Quantities as people write them."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from lightning_mp.ground.core.quantities import format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.3B", 1.3e9),
        ("1.3b", 1.3e9),
        ("400M", 400e6),
        ("5K", 5e3),
        ("1.4T", 1.4e12),
        ("20 B", 20e9),
        ("1e21", 1e21),
        ("5.76E+23", 5.76e23),
        ("1_000", 1000.0),
        ("300_000_000", 3e8),
        (" 7 ", 7.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("1e3K", 1e6),
        (17, 17.0),
        (1e21, 1e21),
        (torch.tensor(3.0), 3.0),
    ],
)
def test_what_can_be_read(text, value):
    assert parse_quantity(text, "tokens") == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (926, "926"), (999.6, "1K"), (100_352, "100K"), (1.3e9, "1.3B"), (999.9e9, "1T"), (1425.5e12, "1430T"),
     (9.999e15, "1e16"), (5.76e23, "5.76e23"), (0.0151, "0.0151"), (0.9999, "1")],
)  # fmt: skip
def test_how_quantities_are_written(value, text):
    assert format_quantity(value) == text


@hypothesis.given(st.floats(min_value=1e-12, max_value=1e40))
def test_what_is_written_can_be_read_to_three_digits(value):
    assert parse_quantity(format_quantity(value), "x") == pytest.approx(value, rel=0.0051)
