"""After the fit: sample, picture, summary."""

import json
from importlib.util import find_spec

from lightning_mp.demo.folder import RunFolder, load_checkpoint
from lightning_mp.demo.model import GPT, GPTConfig
from lightning_mp.demo.sample import generate
from lightning_mp.demo.summary import Summary, format_table

__all__ = ["finish", "printable"]

_PROMPT = b"def "
_SAMPLE_TOKENS = 200


def finish(folder: RunFolder) -> None:
    """Reads what the run left and adds sample, picture and summary; prints the latter.

    It works from the files only, since under some strategies the training happened in other processes.
    """
    history = json.loads(folder.history.read_text())
    sample = printable(generate(_trained_model(folder), _PROMPT, _SAMPLE_TOKENS))
    folder.sample.write_text(sample + "\n", encoding="utf-8")
    summary = Summary.of(history, folder.path)
    folder.summary.write_text(json.dumps(summary.as_dict(), indent=1) + "\n")
    print(f"\nA sample:\n{_indented(sample)}\n")
    if find_spec("matplotlib") is not None:
        from lightning_mp.demo.report import draw_report

        draw_report(history, folder.report)
    else:
        print("No picture is drawn: install matplotlib (pip install 'lightning-mp[plots]').")
    print(format_table(summary, folder))


def _trained_model(folder: RunFolder) -> GPT:
    checkpoint = load_checkpoint(folder.checkpoint)
    shape = {name: checkpoint["hyper_parameters"][name] for name in GPTConfig.__dataclass_fields__}
    model = GPT(GPTConfig(**shape))
    prefix = "model."
    model.load_state_dict({name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items()})
    return model.eval()


def printable(text: bytes) -> str:
    """The text with a dot for every byte that is no text, among them those that would command a terminal."""
    decoded = text.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in decoded)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
