"""The device to train on, and what it is good at."""

import os

import torch

from lightning_mp.demo.settings import Settings

__all__ = ["ACCELERATORS", "choose_accelerator", "limit_threads", "require_precision", "slowness_hint"]

ACCELERATORS = ("auto", "cpu", "cuda", "mps")

_SMALL_MODEL_PARAMETERS = 1_000_000


def choose_accelerator(wish: str) -> str:
    """``"cuda"`` if there is one, else ``"cpu"``; or what is wished for.

    Raises:
        ValueError: If it is unknown or not there.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wish == "auto":
        return "cuda" if available["cuda"] else "cpu"
    if wish not in available:
        raise ValueError(f"--accelerator {wish} is unknown: choose {', '.join(ACCELERATORS[:-1])} or mps.")
    if not available[wish]:
        usable = " or ".join(name for name, there in available.items() if there)
        raise ValueError(f"--accelerator {wish} is not available on this machine: choose {usable}.")
    return wish


def require_precision(precision: str, accelerator: str) -> None:
    """Refuses a 16-bit precision on a device for which torch has no autocast to it.

    Raises:
        ValueError: Names the precisions that work there.
    """
    if precision == "32-true" or _has_autocast(accelerator, precision):
        return
    works = [name for name in ("bf16-mixed", "16-mixed") if _has_autocast(accelerator, name)]
    raise ValueError(
        f"--precision {precision} does not work on {accelerator}, for which torch has no such autocast: "
        f"choose {' or '.join(['32-true', *works])}."
    )


def _has_autocast(accelerator: str, precision: str) -> bool:
    if not torch.amp.is_autocast_available(accelerator):
        return False
    if precision == "bf16-mixed":
        # MPS computes in bf16 from macOS 14 on; before that torch raises only once training runs.
        return accelerator != "mps" or torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def limit_threads(accelerator: str, parameters: int) -> None:
    """One CPU thread for a small model, unless OMP_NUM_THREADS says otherwise.

    Its matrices are so small that threads wait for each other longer than they compute, by far so on a busy machine.
    """
    if accelerator == "cpu" and parameters < _SMALL_MODEL_PARAMETERS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def slowness_hint(settings: Settings, accelerator: str) -> str | None:
    """A line to print where a precision is only emulated, or None."""
    if accelerator != "cpu" or settings.precision == "32-true" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    instructions = {"bf16-mixed": ("avx512_bf16", "amx_bf16", "bf16"), "16-mixed": ("avx512_fp16", "amx_fp16", "fp16")}
    found = torch.cpu.get_capabilities()
    if any(found.get(name) for name in instructions[settings.precision]):
        return None
    name = "bf16" if settings.precision == "bf16-mixed" else "fp16"
    return (
        f"This CPU has no {name} instructions: {settings.precision} computes the right numbers here, but slowly "
        "(several minutes; --params 10000 is quick)."
    )
