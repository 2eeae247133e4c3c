"""Checks of parameters: which are trained, which are frozen, which are one."""

from collections.abc import Iterator, Sequence

from lightning_mp.core.messages import listed
from lightning_mp.preflight_checks.found import Found, FoundWeight
from lightning_mp.preflight_checks.report import PreflightFinding


def check_untrained_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether parameters that require a gradient are trained by an optimizer."""
    if found.weights and not any(weight.is_trainable for weight in found.weights):
        yield PreflightFinding(
            "error",
            "untrained_weights",
            f"None of the {len(found.weights)} parameters has requires_grad=True: there is nothing to train.",
            "Unfreeze what is to be trained: module.head.requires_grad_(True).",
        )
    forgotten = [weight for weight in found.weights if weight.is_trainable and weight.is_optimized is False]
    if forgotten:
        yield PreflightFinding(
            "warning",
            "untrained_weights",
            f"{len(forgotten)} parameters have requires_grad=True and belong to no optimizer ({_names(forgotten)}):"
            " they never change, and their gradients are computed and clipped with the others.",
            "Give them to an optimizer, or freeze them with requires_grad_(False).",
        )


def check_unused_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether DDP would wait for gradients that do not come."""
    unused = [weight for weight in found.weights if weight.is_trainable and weight.has_gradient is False]
    if found.run.needs_all_gradients and not found.run.is_manual and unused:
        yield PreflightFinding(
            "error",
            "unused_weights",
            f"{len(unused)} trainable parameters got no gradient from a training step ({_names(unused)}): under DDP the"
            " second step ends with 'Expected to have finished reduction in the prior iteration'.",
            "Freeze or remove them, or use strategy='ddp_find_unused_parameters_true'.",
        )


def check_frozen_statistics(found: Found) -> Iterator[PreflightFinding]:
    """Whether frozen norms keep learning their running statistics."""
    layers = [layer.name for layer in found.layers if layer.is_frozen and layer.learns_statistics]
    if layers:
        yield PreflightFinding(
            "warning",
            "frozen_statistics",
            f"The weights of {len(layers)} BatchNorm layers are frozen, and their running statistics are not"
            f" ({listed(layers, 3)}): they follow the new data, and the frozen part does not stay what it was.",
            "Call .eval() on the frozen part in on_train_epoch_start as well.",
        )


def check_tied_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether weights that seem to be one are one."""
    by_memory: dict[int, list[FoundWeight]] = {}
    for weight in found.weights:
        if weight.memory is not None and weight.is_trainable:
            by_memory.setdefault(weight.memory, []).append(weight)
    for sharing in by_memory.values():
        if len(sharing) > 1:
            yield PreflightFinding(
                "error",
                "tied_weights",
                f"{_names(sharing)} share their memory and are different parameters: each gets a part of the gradient,"
                " an optimizer steps the memory once for each, and a cast or a move to another device separates them.",
                "Tie them as one parameter: head.weight = embedding.weight.",
            )
    for pair in found.untied:
        yield PreflightFinding(
            "warning",
            "tied_weights",
            f"The model's config says tie_word_embeddings=True, and {pair} are different parameters.",
            "Call tie_weights() on the model after loading or replacing its embeddings.",
        )


def _names(weights: Sequence[FoundWeight]) -> str:
    return listed([weight.names[0] for weight in weights], 3)
