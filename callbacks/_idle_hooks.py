"""Hooks of callbacks that have nothing to do.

Lightning enters its profiler for every hook of every callback, also for one that does nothing: some 20 Python calls,
six times per micro-batch. It passes over a hook that is None. So a hook is None on the instance for as long as it has
nothing to do; the class keeps it, and so does a subclass with a hook of its own.
"""

from collections.abc import Iterable

from lightning.pytorch.callbacks import Callback

__all__ = ["BATCH_HOOKS", "idle", "skip_inherited_hooks", "wake"]

#: What Lightning calls on every micro-batch.
BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def idle(callback: Callback, owner: type[Callback], *hooks: str) -> None:
    """Has Lightning pass over hooks of a callback until :func:`wake`.

    Args:
        callback: any instance of ``owner``.
        owner: the class whose versions of the hooks have nothing to do; a subclass's own are called as before.
        hooks: names.

    Example:
        >>> callback = Callback()
        >>> idle(callback, Callback, "on_train_batch_end")
        >>> callback.on_train_batch_end is None
        True
        >>> wake(callback, "on_train_batch_end")
        >>> callback.on_train_batch_end is None
        False
    """
    for hook in hooks:
        if getattr(type(callback), hook) is getattr(owner, hook):
            vars(callback).setdefault(hook, None)


def wake(callback: Callback, *hooks: str) -> None:
    """Has Lightning call hooks again."""
    for hook in hooks:
        if hook in vars(callback) and vars(callback)[hook] is None:
            del vars(callback)[hook]


def skip_inherited_hooks(callbacks: Iterable[Callback]) -> None:
    """Has Lightning pass over the hooks that callbacks of the pack inherit from ``Callback``, where they do nothing."""
    for callback in callbacks:
        if any(base.__module__.startswith("lightning_mp.") for base in type(callback).__mro__):
            idle(callback, Callback, *BATCH_HOOKS)
