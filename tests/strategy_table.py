"""docs/strategies.md, written from what the runs of every cell gave."""

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from strategy_runs import ACCUMULATION, CLIPPING, GRADIENT_WINDOW, LOSS_WINDOW, NUM_WINDOWS, STRATEGIES, Cell

__all__ = ["page"]

_TEXT = f"""# Precision plugins on Lightning's strategies

This page is written by `python tests/test_strategy_matrix.py`, and `make test-full` compares it with new runs. Every
cell is a training run of {NUM_WINDOWS} optimizer steps on 2 or 4 processes (CPU, gloo). "equal" says that

- the losses and the gradient norms of all steps and the final weights are those of one process that sees all data, with
  the same plugin, within the tolerance of the row (relative for losses and norms, absolute for weights);
- the ranks agree to the bit on norms and final weights;
- overflows planted on the last rank, an infinite loss in step {LOSS_WINDOW + 1} and, in step {GRADIENT_WINDOW + 1}, an
  infinite gradient element in its shard alone after the reduction, are skipped by all ranks; no other step is, and the
  loss scale goes the same way.

Tolerances are twice the distance between 1 and the next number of the coarsest format in the row: 2^-9 where it is
fp16, 2^-6 where it is bf16. The one process itself is tested against a plain fp32 PyTorch loop within twice that.

Without accumulation the optimizer is SGD with momentum, unfused, and all ranks have equally many samples. Windows of 3
micro-batches (`AccumulationScheduler`) have a fused AdamW, micro-batches of different sizes, and ranks with different
numbers of samples.

"16-mixed" and "bf16-mixed" are `AutocastPrecision`, "16-true" and "bf16-true" `MasterWeightsPrecision`, "remainder" its
`storage="remainder"`. FSDP1 runs through a subclass of `FSDPStrategy` for tests that tells torch to use the CPU; FSDP2
and tensor parallelism are Lightning's `ModelParallelStrategy`. "bf16 reduction" and "fp16 reduction" are
`ReducedPrecisionDDPStrategy`, also named `mp_ddp_bf16_reduce` and `mp_ddp_fp16_reduce`; 16-bit gradients, as masters
have them, are reduced as they are.

What FSDP1 does differently under autocast: it casts floating-point batches to 16 bit, targets too, and gathers all
parameters in 16 bit. With a `policy` that names modules it does neither.
"""

_NOT_VERIFIED = """
## What is not verified

Nothing on this page ran on a GPU or over NCCL, on more than 4 processes, or on more than one machine.
"""


def page(results: Mapping[tuple[str, Cell], str], tolerances: Mapping[tuple[str, str], float]) -> str:
    """The whole page.

    Args:
        results: "equal", or the message of the refusal.
        tolerances: of each strategy and precision.
    """
    messages = list(dict.fromkeys(text for text in results.values() if text != "equal"))
    lines = [_TEXT, *_header()]
    for (strategy, precision), cells in groupby(results.items(), key=lambda item: (item[0][0], item[0][1].precision)):
        shown = [text if text == "equal" else f"refused [{messages.index(text) + 1}]" for _, text in cells]
        tolerance = f"2^{math.log2(tolerances[strategy, precision]):.0f}" if "equal" in shown else "-"
        lines.append(f"| {strategy} | {STRATEGIES[strategy].ranks} | {precision} | {tolerance} | {' | '.join(shown)} |")
    lines += ["", "Refusals, at set-up:", ""]
    lines += [f"{number}. {message}" for number, message in enumerate(messages, start=1)]
    return "\n".join(lines) + "\n" + _NOT_VERIFIED


def _header() -> Iterator[str]:
    columns = [
        f"{'no clipping' if clipping == 'none' else f'clip by {clipping}'}, {number} micro-batch{'es' * (number > 1)}"
        for clipping in CLIPPING
        for number in ACCUMULATION
    ]
    yield f"| strategy | processes | precision | tolerance | {' | '.join(columns)} |"
    yield "|" + "---|" * (4 + len(columns))
