"""Pictures that a verb is to draw."""

from importlib.util import find_spec
from pathlib import Path

from lightning_mp.core.pictures import check_picture_ending


def check_picture(path: Path, option: str) -> None:
    """Before the work: a picture that cannot be drawn should not cost a run."""
    check_picture_ending(path, option)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}. Make it first")
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install 'lightning-mp[plots]'")
