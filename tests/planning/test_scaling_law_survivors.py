"""Fits of a scaling law that end on a bound: said, certified as what they are, and not by another name."""

from types import SimpleNamespace

import pytest
from test_scaling_law_fit import made_runs

from lightning_mp.planning.scaling_laws.fit import fit_scaling_law

ON_A_BOUND = "The runs do not determine the law: E, alpha or beta ran into its bound"


def law(irreducible, alpha=0.34, beta=0.28):
    return SimpleNamespace(loss=lambda n, d: irreducible + 400 * (n / 1e8) ** -alpha + 400 * (d / 1e10) ** -beta)


def test_a_loss_that_falls_to_nothing_puts_the_constant_on_its_bound():
    runs = made_runs(30, noise=0.0, law=law(0.0))
    with pytest.warns(UserWarning, match=ON_A_BOUND):
        fit = fit_scaling_law(runs, bootstrap_samples=100)
    assert fit.certificate.on_bound
    assert not fit.certificate.converged
    # A millionth of the lowest loss: low enough to be nothing, and not so low as to be another law.
    lowest_loss = min(run.loss for run in runs)
    assert fit.law.E / lowest_loss == pytest.approx(1e-6, rel=1e-3)
    assert fit.law.alpha == pytest.approx(0.34, abs=0.05)


@pytest.mark.parametrize(
    ("exponents", "name"), [((7.0, 0.3), "alpha"), pytest.param((0.3, 7.0), "beta", marks=pytest.mark.full)]
)
def test_an_exponent_that_no_power_law_has_is_on_its_bound(exponents, name):
    with pytest.warns(UserWarning, match=ON_A_BOUND):
        fit = fit_scaling_law(made_runs(30, noise=0.0, law=law(2.0, *exponents)), bootstrap_samples=100)
    assert fit.certificate.on_bound
    assert getattr(fit.law, name) == pytest.approx(5.0)


def test_a_minimum_that_all_starts_find_is_not_certified_on_a_bound():
    """Losses below any law with a positive constant: the fit is as good as can be, and says little."""
    with pytest.warns(UserWarning, match=ON_A_BOUND):
        fit = fit_scaling_law(made_runs(30, noise=0.001, law=law(-100.0)), bootstrap_samples=100)
    certificate = fit.certificate
    assert (certificate.on_bound, certificate.converged) == (True, False)
    assert certificate.agreeing > certificate.starts / 10
    assert certificate.gradient < 1e-6
