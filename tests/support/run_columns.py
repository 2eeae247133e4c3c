"""The columns of a run of optimizer steps, as the demo writes them and its picture reads them."""

NUM_STEPS = 40


def run_columns(precision="16-mixed", skipped=(), num_steps=NUM_STEPS):
    """Of steps and of validations. From the 20th step on there are two micro-batches of 100 tokens."""
    tokens = [100 * (step + 1 + max(0, step - 19)) for step in range(num_steps)]
    scaled = precision.startswith("16")
    steps = {
        "tokens": tokens,
        "train_loss": [2.0 + 3.5 * 0.9**step for step in range(num_steps)],
        "learning_rate": [1e-3 * (num_steps - step) for step in range(num_steps)],
        "loss_scale": [
            2.0 ** (16 - sum(skip < step for skip in skipped)) if scaled else 1.0 for step in range(num_steps)
        ],
        "skipped": [step in skipped for step in range(num_steps)],
        "grad_norm": [None if precision == "32-true" else 1.0 for _ in range(num_steps)],
    }
    return steps, {"tokens": tokens[9::10], "loss": [2.5, 2.3, 2.2, 2.1][: num_steps // 10]}
