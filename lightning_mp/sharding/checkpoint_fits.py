"""Whether a checkpoint was written by the model and the optimizers that it is loaded into."""

from collections.abc import Iterable, Sequence

__all__ = ["refuse_other_groups", "refuse_other_names"]


def refuse_other_names(owner: str, *, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Says what of a state dict is too little or too much, for loading that is strict.

    Args:
        owner: class of the model.
        missing: names that the model has and the checkpoint has not.
        unexpected: the other way round.

    Raises:
        RuntimeError: if there is any, as ``nn.Module.load_state_dict``.

    Example:
        >>> refuse_other_names("Model", missing=[], unexpected=[])
    """
    missing, unexpected = list(missing), list(unexpected)
    if missing or unexpected:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {owner}: missing keys {missing}, unexpected keys {unexpected}. Use the"
            " model that the checkpoint was written by, or strict_loading=False."
        )


def refuse_other_groups(saved: Sequence[int], own: Sequence[int]) -> None:
    """Compares how many parameters each parameter group of an optimizer has.

    Raises:
        ValueError: if groups are others.

    Example:
        >>> refuse_other_groups([2, 1], [2, 1])
    """
    if list(saved) != list(own):
        raise ValueError(
            f"The checkpoint's optimizer has parameter groups of {list(saved)} parameters, and configure_optimizers"
            f" made groups of {list(own)}. Use the model that it was written by, or load its weights only."
        )
