"""``lightning-mp fit``: a scaling law from a CSV of finished runs."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_mp.ground.core.cli_text import (
    print_facts,
    print_json,
    print_paragraph,
    print_table,
    print_warnings,
    run_with_one_line_errors,
)
from lightning_mp.ground.core.pictures import check_picture
from lightning_mp.ground.core.quantities import format_quantity, parse_flops, parse_fraction
from lightning_mp.planning.scaling_laws.fit import Interval, ScalingLawFit, fit_scaling_law
from lightning_mp.planning.scaling_laws.optimum import warn_far_outside

_DESCRIPTION = """\
Fit L(N, D) = E + A / N^alpha + B / D^beta to finished runs. The file is a CSV with a header: parameters, loss, and
tokens or flops, separated by commas, semicolons or tabs; numbers may be written 1.3B or 1e21. If the fit is not
certified to be a minimum, the output says so first and contains no plan."""

_EXAMPLES = """\
examples:
  lightning-mp fit runs.csv
  lightning-mp fit runs.csv --flops 1e22 --plot frontier.png
  lightning-mp fit runs.csv --confidence 80% --json

  runs.csv:
    parameters,tokens,loss
    124M,2.5B,3.29
    350M,7B,2.93"""


def fill_fit(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``fit`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("runs", type=Path, metavar="RUNS.CSV", help="one line per finished run")
    parser.add_argument("--flops", metavar="C", help="compute budget to plan for; default: ten times the largest run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs and the frontier: png, pdf or svg")
    parser.add_argument("--samples", type=int, default=4000, metavar="S", help="bootstrap samples; default 4000")
    parser.add_argument(
        "--confidence",
        default="95%",
        metavar="P",
        help="confidence of the intervals, such as 0.8 or 80%% (default 95%%)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the bootstrap; default 0")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    (fit, budget), said = run_with_one_line_errors(arguments, lambda: _fit(arguments))
    if arguments.json:
        print_json({**_as_json(fit, budget), "warnings": said})
    else:
        _print_fit(fit, budget)
        if arguments.plot is not None:
            print(f"\nSaved the plot to {arguments.plot}.")
        print_warnings([text for text in said if text != fit.certificate.problem])
    return 0


def _fit(arguments: argparse.Namespace) -> tuple[ScalingLawFit, float]:
    plot: Path | None = arguments.plot
    budget = None if arguments.flops is None else parse_flops(arguments.flops, "flops")
    confidence = parse_fraction(arguments.confidence, "confidence")
    if plot is not None:
        check_picture(plot, "--plot")
    fit = fit_scaling_law(
        arguments.runs, bootstrap_samples=arguments.samples, confidence=confidence, seed=arguments.seed
    )
    budget = budget or 10 * max(run.flops for run in fit.runs)
    if fit.certificate.converged:
        warn_far_outside(fit.law, *fit.law.frontier.optimum(budget))
    if plot is not None:
        from lightning_mp.planning.scaling_laws.fit_plot import draw_fit

        draw_fit(fit, plot, budget)
    return fit, budget


def _as_json(fit: ScalingLawFit, budget: float) -> dict[str, Any]:
    law, certificate = fit.law, fit.certificate
    parameters, tokens = law.frontier.optimum(budget)
    return {
        "runs": len(fit.runs),
        "constants": {name: getattr(law, name) for name in ("E", "A", "B", "alpha", "beta")},
        "exponent_a": law.frontier.exponent,
        "confidence": fit.confidence,
        "intervals": {name: [interval.low, interval.high] for name, interval in fit.intervals.items()},
        "certificate": asdict(certificate) | {"unconverged_bootstrap_samples": fit.unconverged_samples},
        "noise": fit.noise,
        "outliers": [
            {**asdict(one.run), "run": one.number, "predicted_loss": one.predicted_loss, "deviations": one.deviations}
            for one in fit.outliers
        ],
        "held_out": None if fit.held_out is None else asdict(fit.held_out),
        "plan": None
        if not certificate.converged
        else {
            "flops": budget,
            "parameters": parameters,
            "tokens": tokens,
            "loss": law.loss(parameters, tokens),
            "times_outside_range": law.trained.times_outside(parameters, tokens),
            "intervals": {
                name: [interval.low, interval.high] for name, interval in fit.optimum_intervals(budget).items()
            },
        },
    }


def _print_fit(fit: ScalingLawFit, budget: float) -> None:
    law, percent, certified = fit.law, f"{100 * fit.confidence:g}%", fit.certificate.converged
    if not certified:
        print_paragraph(f"NOT CERTIFIED, so there is no plan. {fit.certificate.problem}\n")
    print_paragraph(f"L(N, D) = E + A / N^alpha + B / D^beta, fitted to {len(fit.runs)} runs: {law.trained}\n")
    values = {name: getattr(law, name) for name in ("E", "A", "B", "alpha", "beta")} | {"a": law.frontier.exponent}
    rows = [(name, f"{values[name]:.4g}", *_ends(interval)) for name, interval in fit.intervals.items()]
    print_table(("constant", "value", f"{percent} from", "to"), rows)
    print("\n  a is the exponent of the best model size: N grows as C^a\n")
    certificate = fit.certificate
    trust = "a minimum" if certified else "NOT CERTIFIED"
    gradient = f"gradient {certificate.gradient:.0e} of its terms"
    facts = [
        ("Certificate", f"{trust}: {certificate.agreeing} of {certificate.starts} starts agree, {gradient}"),
        ("Bootstrap", f"{len(fit.samples):,} samples, {fit.unconverged_samples} of them not converged"),
        ("Noise", f"{100 * fit.noise:.2g}% of the loss"),
    ]
    if fit.held_out is not None:
        held = fit.held_out
        text = f"the {held.runs} runs of most compute, left out and predicted: largest error "
        text += f"{100 * held.largest_error:.2g}% of the loss, mean {100 * held.mean_error:+.2g}%"
        facts.append(("Forecast test", text))
    print_facts([*facts, ("Outliers", str(len(fit.outliers) or "none"))], width=13, indent="")
    if fit.outliers:
        outliers = [
            (
                str(outlier.number),
                format_quantity(outlier.run.parameters),
                format_quantity(outlier.run.tokens),
                f"{outlier.run.loss:.4g}",
                f"{outlier.predicted_loss:.4g}",
                f"{outlier.deviations:+.1f}",
            )
            for outlier in fit.outliers
        ]
        print_table(("run", "parameters", "tokens", "loss", "predicted", "deviations"), outliers)
    if certified:
        _print_optimum(fit, budget, percent)


def _print_optimum(fit: ScalingLawFit, budget: float, percent: str) -> None:
    parameters, tokens = fit.law.frontier.optimum(budget)
    values = {"parameters": parameters, "tokens": tokens, "loss": fit.law.loss(parameters, tokens)}
    times = fit.law.trained.times_outside(parameters, tokens)
    where = "inside the range of the runs" if times == 1 else f"{times:.2g} times outside the range of the runs"
    print(f"\nBest model for {format_quantity(budget)} FLOPs, {where}:\n")
    rows = []
    for name, interval in fit.optimum_intervals(budget).items():
        write = (lambda value: f"{value:.4g}") if name == "loss" else format_quantity
        rows.append((name, write(values[name]), write(interval.low), write(interval.high)))
    print_table(("", "value", f"{percent} from", "to"), rows)


def _ends(interval: Interval) -> tuple[str, str]:
    return f"{interval.low:.4g}", f"{interval.high:.4g}"
