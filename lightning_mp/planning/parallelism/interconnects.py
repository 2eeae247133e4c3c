"""How fast the links of machines are, inside a node and between nodes, each with its source.

The figures live in ``interconnects.csv`` beside this file as vendors print them: NVLink in GB/s of one GPU, both
directions together; network adapters in Gb/s of one direction, of those that are for the cluster. What is requested
here is bytes per second of one GPU in one direction: half the former, and an eighth of the latter shared out to the
GPUs of the node. Both are signalling rates; what NCCL reaches is less.
"""

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from lightning_mp.core.arguments import positive_number


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of one kind and the network between them.

    Raises:
        ValueError: a number is not positive.

    Example:
        One that is not in the table, with 4 GPUs and one adapter of 100 Gb/s:

        >>> mine = Machine("mine", "L40S", gpus_per_node=4, inside_bytes_per_second=32e9,
        ...                between_bytes_per_second=100e9 / 8 / 4)
        >>> mine.between_bytes_per_second / 1e9
        3.125
    """

    name: str
    """What people call it."""
    chip: str
    """A short name of :func:`~lightning_mp.flops.hardware.known_chips`."""
    gpus_per_node: int
    """How many are behind the inner links."""
    inside_bytes_per_second: float
    """Of one GPU to the others of its node, in one direction."""
    between_bytes_per_second: float
    """Of one GPU's share of the node's adapters, in one direction."""
    source: str = "given by the caller"
    """Where the figures are printed."""
    checked: str = ""
    """Month, such as "2026-11", in which they were found in published text. Empty: not looked up."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "inside_bytes_per_second", "between_bytes_per_second"):
            positive_number(getattr(self, name), name, "Machine")


@lru_cache(maxsize=1)
def known_machines() -> tuple[Machine, ...]:
    """Every machine of the data file, in its order."""
    data = resources.files("lightning_mp.planning.parallelism").joinpath("interconnects.csv")
    text = data.read_text(encoding="utf-8")
    return tuple(_machine(row) for row in csv.DictReader(text.splitlines()))


def find_machine(name: str) -> Machine:
    """Finds a machine by name, ignoring case.

    Raises:
        ValueError: it is not in the table.

    Example:
        >>> machine = find_machine("dgx h100")
        >>> machine.inside_bytes_per_second / 1e9, machine.between_bytes_per_second / 1e9
        (450.0, 50.0)
    """
    for machine in known_machines() if isinstance(name, str) else ():
        if machine.name.lower() == name.strip().lower():
            return machine
    raise ValueError(
        f"`machine` {name!r} is not known. Known: {', '.join(machine.name for machine in known_machines())}. For"
        " another make a lightning_mp.planning.parallelism.interconnects.Machine."
    )


def _machine(row: dict[str, str]) -> Machine:
    gpus = int(row["gpus_per_node"])
    between = int(row["adapters_per_node"]) * float(row["adapter_gigabits_per_second"]) * 1e9 / 8 / gpus
    inside = float(row["inside_gigabytes_per_second"]) * 1e9 / 2
    return Machine(row["machine"], row["chip"], gpus, inside, between, row["source"], row["checked"])
