"""The 20-tokens rule against the table it comes from."""

import pytest

from lightning_mp.planning import tokens_for, training_flops

# Hoffmann et al. 2022 (arXiv:2203.15556), Table 3: parameters, FLOPs, tokens of Approach 1.
TABLE_3 = [
    (400e6, 1.92e19, 8.0e9),
    (1e9, 1.21e20, 20.2e9),
    (10e9, 1.23e22, 205.1e9),
    (67e9, 5.76e23, 1.5e12),
    (175e9, 3.85e24, 3.7e12),
    (280e9, 9.90e24, 5.9e12),
    (520e9, 3.43e25, 11.0e12),
    (1e12, 1.27e26, 21.2e12),
    (10e12, 1.30e28, 216.2e12),
]


@pytest.mark.parametrize(("parameters", "flops", "tokens"), TABLE_3)
def test_rule_of_twenty_and_six_n_d_agree_with_table_3(parameters: float, flops: float, tokens: float) -> None:
    # The ratio grows from 20.0 to 21.6 over the table, and the 67B row is printed to two digits (22.4).
    assert tokens_for(parameters) == pytest.approx(tokens, rel=0.12)
    assert training_flops(parameters, tokens) == pytest.approx(flops, rel=0.05)


def test_the_rule_costs_120_n_squared() -> None:
    assert training_flops(1e9, tokens_for(1e9)) == pytest.approx(120 * 1e9**2)


def test_tokens_are_a_whole_number_for_any_ratio() -> None:
    assert tokens_for(1001, 0.5) == 500
    assert isinstance(tokens_for(100_352, 20), int)
