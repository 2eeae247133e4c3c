"""What all pictures share: the files that they can be written to, and their colours."""

from importlib.util import find_spec
from pathlib import Path

PICTURE_ENDINGS = (".png", ".pdf", ".svg")
# Okabe and Ito's palette, distinguishable with every kind of colour blindness: https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, PURPLE, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
GREY = "#555555"


def check_picture_ending(path: Path, option: str = "") -> None:
    """Refuses what matplotlib would only refuse once the picture is drawn."""
    if path.suffix.lower() not in PICTURE_ENDINGS:
        allowed = ", ".join(PICTURE_ENDINGS)
        raise ValueError(f"{option} {path} cannot be drawn: its name must end with one of {allowed}.".lstrip())


def check_picture(path: Path, option: str) -> None:
    """Before the work: a picture that cannot be drawn should not cost a run."""
    check_picture_ending(path, option)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}. Make it first")
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install '.[plots]'")
