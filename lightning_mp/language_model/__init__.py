"""A small GPT, its LightningModule, and text to train it on.

The demo, ``lightning-mp compare``, the recipes, the notebooks and the documentation train this model. It is a starting
point for your own.
"""

from lightning_mp.language_model.gpt import GPT, GPTConfig, config_for_parameters, generate
from lightning_mp.language_model.module import LanguageModel, peak_learning_rate
from lightning_mp.language_model.text import (
    Corpus,
    HeldOutBatches,
    TextBatches,
    TextData,
    load_file,
    load_standard_library,
    load_text,
)

__all__ = [
    "GPT",
    "Corpus",
    "GPTConfig",
    "HeldOutBatches",
    "LanguageModel",
    "TextBatches",
    "TextData",
    "config_for_parameters",
    "generate",
    "load_file",
    "load_standard_library",
    "load_text",
    "peak_learning_rate",
]


def __dir__() -> list[str]:
    return __all__
