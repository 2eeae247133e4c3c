"""Trains in every precision, in pairs, and writes docs/results/quality.md: figures, pictures, verdicts.

.. code-block:: bash

    make evidence                       # about an hour on 2 cores; continues where it was stopped
    make evidence ARGS="--quick"        # a few minutes: shows that it works, and says little

Real text and the demo's model, at two learning rates; a small vision transformer on scikit-learn's handwritten digits,
where that package is installed; adapters on a model that was trained on code, tuned on prose; masters of 24 bits, with
8-bit moments where torchao is installed. The page, with its pictures and the results as JSON, is written from the files
of ``--out``. Failed and unclear results are there like
the others.
"""

import argparse
import inspect
import json
import math
import platform
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from evidence_page import write_page
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import MasterWeightsPrecision, compare_precisions
from lightning_mp.demo.cli import short_runs
from lightning_mp.demo.settings import CLIP_NORM
from lightning_mp.language_model import (
    Corpus,
    LanguageModel,
    TextData,
    config_for_parameters,
    load_file,
    load_standard_library,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "quality.md"
PRECISIONS = (
    "32-true",
    "lightning:bf16-mixed",
    "bf16-mixed",
    "bf16-true",
    "bf16-true+remainder",
    "16-mixed",
    "fp8-tensorwise",
    "fp8-mixed",
)
MASTERS_OF_24_BITS = ("32-true", "bf16-true", "bf16-true+24bit")
#: torchao quantises moments of at least 4,096 elements: here those of all matrices but the attention's last.
LOW_BIT_PARAMETERS = 100_000
ADAPTER_RANK = 4
#: At the demo's own rate the intervals are ten times as wide, see `text_demo_rate_part`.
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    params: int = 20_000
    steps: int = 100
    seeds: int = 10
    rounds: int = 5
    batch_size: int = 8


QUICK = Sizes(steps=20, seeds=3, rounds=1, batch_size=2)


class NotMeasured(Exception):
    """A part that this installation cannot run, and why."""


class VisionTransformer(pl.LightningModule):
    """Pictures of 8 by 8 into ten classes; four patches a side (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

    def __init__(self, width: int = 64, layers: int = 2, total_steps: int = 100) -> None:
        super().__init__()
        self.total_steps = total_steps
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy in nats."""
        tokens = self.patches(batch[0]).flatten(2).transpose(1, 2) + self.position
        return cross_entropy(self.head(self.blocks(tokens).mean(1)).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """One batch."""
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs ``val/loss``."""
        self.log("val/loss", self.loss(batch), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        """AdamW whose rate falls along a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LowBitMoments(MasterWeightsPrecision):
    """Marks the runs that have 8-bit moments."""


class LowBitModel(LanguageModel):
    """Has torchao's 8-bit AdamW in the runs that are marked, else its own."""

    def configure_optimizers(self) -> Any:
        """With the schedule of the model."""
        found: Any = super().configure_optimizers()
        if not isinstance(self.trainer.precision_plugin, LowBitMoments):
            return found
        from torchao.optim import AdamW8bit

        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in found["optimizer"].param_groups]
        optimizer = AdamW8bit(groups, lr=self.hparams["learning_rate"], betas=found["optimizer"].defaults["betas"])
        schedule = found["lr_scheduler"]["scheduler"].lr_lambdas[0]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Adapted(nn.Module):
    """A frozen layer and a low-rank update of it (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output plus the update's."""
        out: Tensor = self.layer(x)
        return out + linear(linear(x, self.down), self.up)


def text_part(sizes: Sizes, out: Path) -> dict[str, Any]:
    """The demo's model on the source text of the standard library, at a learning rate of 3e-3."""
    make_module, make_data = text_runs(load_standard_library(), sizes)
    return compared(partial(make_module, learning_rate=LEARNING_RATE), make_data, sizes, out / "text.jsonl")


def text_demo_rate_part(sizes: Sizes, out: Path) -> dict[str, Any]:
    """The same at the demo's learning rate, which is 1e-2 for so small a model.

    Two runs that differ by rounding alone part within 30 steps, and leave a plateau near 3.1 nats at different steps:
    here it is chance that the differences measure, more than the precision.
    """
    make_module, make_data = text_runs(load_standard_library(), sizes)
    return compared(make_module, make_data, sizes, out / "text_demo_rate.jsonl")


def vision_part(sizes: Sizes, out: Path) -> dict[str, Any]:
    """A vision transformer on scikit-learn's digits: 1,797 pictures of 8 by 8, of which every fifth is held out."""
    if find_spec("sklearn") is None:
        raise NotMeasured("not measured: scikit-learn, whose pictures it trains on, is not installed")
    from sklearn.datasets import load_digits

    pictures, digits = load_digits(return_X_y=True)
    images = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(digits)
    held_out = torch.arange(len(images)) % 5 == 4
    data = DataLoader(TensorDataset(images[~held_out], classes[~held_out]), batch_size=64, shuffle=True)
    validation = DataLoader(TensorDataset(images[held_out], classes[held_out]), batch_size=len(images))
    make = lambda: VisionTransformer(total_steps=sizes.steps)  # noqa: E731
    return compared(make, data, sizes, out / "vision.jsonl", val_data=validation)


def adapters_part(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Adapters of rank 4 on a model trained on code, tuned on the prose of Python's manual."""
    pretrained = trained_on_code(sizes, out)
    prose = load_file(Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py"))
    make_module, make_data = text_runs(prose, sizes)

    def make() -> LanguageModel:
        module = make_module(learning_rate=LEARNING_RATE)
        module.load_state_dict(pretrained)
        return with_adapters(module)

    return compared(make, make_data, sizes, out / "adapters.jsonl")


def masters_of_24_bits_part(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Masters of 24 bits, with fp32 and with 8-bit moments (torchao's AdamW8bit): 13 and 7 bytes per parameter.

    The text of the first part, and a model of at least 100,000 parameters, of which most have 8-bit moments.
    """
    precisions: dict[str, Any] = {name: name for name in MASTERS_OF_24_BITS}
    if find_spec("torchao") is not None:
        precisions["bf16-true+24bit, 8-bit moments"] = lambda: LowBitMoments("bf16-true", storage="24bit")
    shape = config_for_parameters(max(sizes.params, LOW_BIT_PARAMETERS))
    make_module, make_data = short_runs(
        load_standard_library(), shape, sizes.steps, sizes.batch_size, fused=False, module=LowBitModel
    )
    make = partial(make_module, learning_rate=LEARNING_RATE)
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step for every shape
        return compared(make, make_data, sizes, out / "masters_of_24_bits.jsonl", precisions=precisions)


def text_runs(corpus: Corpus, sizes: Sizes) -> tuple[Callable[..., LanguageModel], Callable[[], TextData]]:
    """Not fused, since Lightning's own mixed precision refuses that with clipping."""
    return short_runs(corpus, config_for_parameters(sizes.params), sizes.steps, sizes.batch_size, fused=False)


def trained_on_code(sizes: Sizes, out: Path) -> dict[str, Tensor]:
    """The weights that adapters start from, made once."""
    file = out / f"pretrained_{sizes.params}_{sizes.steps}.pt"
    if not file.is_file():
        make_module, make_data = text_runs(load_standard_library(), sizes)
        torch.manual_seed(0)
        module = make_module()
        trainer = pl.Trainer(
            max_steps=sizes.steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            gradient_clip_val=CLIP_NORM,
            limit_val_batches=0,
        )
        trainer.fit(module, make_data())
        temporary = file.with_suffix(".part")
        torch.save(module.state_dict(), temporary)
        temporary.replace(file)
    weights: dict[str, Tensor] = torch.load(file, weights_only=True)
    return weights


def with_adapters(module: LanguageModel) -> LanguageModel:
    """Freezes the model, and puts an adapter on every linear layer of its blocks."""
    module.requires_grad_(False)
    for block in module.model.blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(parent, name, Adapted(layer, ADAPTER_RANK))
    return module


def compared(
    make_module: Callable[[], pl.LightningModule],
    data: Any,
    sizes: Sizes,
    file: Path,
    val_data: Any = None,
    precisions: Any = None,
) -> dict[str, Any]:
    """Runs or resumes the pairs of one part, and draws its picture beside the page."""
    found = compare_precisions(
        make_module,
        data,
        PRECISIONS if precisions is None else precisions,
        steps=sizes.steps,
        seeds=sizes.seeds,
        rounds=sizes.rounds,
        monitor="val/loss",
        val_data=val_data,
        file=file,
        accelerator="cpu",
        trainer_options={"gradient_clip_val": CLIP_NORM},
    )
    print(f"\n{found}\n")
    if find_spec("matplotlib") is not None:
        found.plot(file.with_suffix(".png"))
    return {**found.as_dict(), "table": str(found)}


PARTS: Mapping[str, Callable[[Sizes, Path], dict[str, Any]]] = {
    "text": text_part,
    "text_demo_rate": text_demo_rate_part,
    "vision": vision_part,
    "adapters": adapters_part,
    "masters_of_24_bits": masters_of_24_bits_part,
}


def what_is_small(sizes: Sizes, *, quick: bool) -> str:
    """Says that a run is smaller than the default one; empty where it is not."""
    if quick:
        return "A quick run: it shows that the command works. Runs this short and few say little."
    given, full = asdict(sizes), asdict(Sizes())
    smaller = [f"{name} {given[name]:,} instead of {full[name]:,}" for name in full if given[name] < full[name]]
    return f"Smaller than the default run: {', '.join(smaller)}." if smaller else ""


def run_parts(parts: list[str], sizes: Sizes, out: Path, *, quick: bool, command: str) -> None:
    """Writes ``<part>.json`` into the folder; of runs that are in its files already none is made again."""
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        facts = {
            "part": part,
            "about": inspect.getdoc(PARTS[part]) or "",
            "sizes": asdict(sizes),
            "limits": what_is_small(sizes, quick=quick),
            "command": command,
            "commit": commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
            "versions": {"python": platform.python_version(), **installed("torchao", "scikit-learn")},
        }
        try:
            facts["result"] = PARTS[part](sizes, out)
        except NotMeasured as reason:
            facts["not_measured"] = str(reason)
            print(f"{part}: {reason}")
        temporary = out / f"{part}.json.part"
        temporary.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
        temporary.replace(out / f"{part}.json")


def installed(*packages: str) -> dict[str, str]:
    """The versions of those of the packages that are there."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def commit() -> str:
    """The commit of this clone; "unknown" outside of one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """The class of the machine."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} thread(s)"


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts and writes the page; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/evidence.py", description="Paired runs in every precision.")
    parser.add_argument("--quick", action="store_true", help="small sizes: a few minutes")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    for name, kind in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default {kind}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default runs/evidence, or runs/evidence_quick")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default docs/results/quality.md")
    given = parser.parse_args(arguments)
    sizes = QUICK if given.quick else Sizes()
    own = {name: getattr(given, name) for name in asdict(sizes) if getattr(given, name) is not None}
    sizes = replace(sizes, **own)
    out = given.out or Path("runs", "evidence_quick" if given.quick else "evidence")
    torch.set_num_threads(1)  # matrices so small that threads wait for each other longer than they compute
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "scripts/evidence.py", *words])
    try:
        run_parts(given.parts, sizes, out, quick=given.quick, command=command)
    except KeyboardInterrupt:
        print(f"\nInterrupted. Finished runs are in {out}; the same command continues from them.", file=sys.stderr)
        return 130
    write_page(out, given.page, PARTS)
    print(f"The page is {given.page}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
