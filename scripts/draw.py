"""Draw the figures of the documentation: `python scripts/draw.py` writes docs/drawings/*.svg.

The same text comes out on every machine; tests/docs/test_drawings.py compares it with the committed files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from itertools import product
from pathlib import Path

from lightning_mp.ground.core.bit_layouts import BF16, FP8_E4M3FN, FP8_E5M2, FP16, FP32, NumberFormat

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"

INK, PALE, LINE = "#1f2933", "#f3f5f7", "#8795a1"
ORANGE, BLUE, GREEN, RED, PURPLE, GREY = "#f2b366", "#8ab6e8", "#93cfa2", "#ee9a94", "#c3a5e0", "#dfe4e9"
RAISED = str.maketrans("0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
LETTER = 0.5
"""Width of a letter over its size, by which text is fitted into its box."""


@dataclass
class Drawing:
    """An SVG picture, built from boxes, words and arrows.

    Attributes:
        width: in pixels.
        height: in pixels.
        title: the text for readers who cannot see it.
    """

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, colour: str, words: str = "", *, size: int = 13) -> None:
        """A filled box with centred words; `|` begins another line."""
        assert all(len(line) * size * LETTER <= w for line in words.split("|")), f"{words!r} is wider than its box"
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}" stroke="{LINE}"/>'
        )
        lines = words.split("|") if words else []
        for index, line in enumerate(lines):
            above = (index - (len(lines) - 1) / 2) * (size + 3)
            self.words(x + w / 2, y + h / 2 + above + size * 0.35, line, size=size, anchor="middle")

    def part(self, x: float, y: float, w: float, h: float, colour: str) -> None:
        """A piece of a box."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{colour}" shape-rendering="crispEdges"/>'
        )

    def words(
        self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", bold: bool = False
    ) -> None:
        """One line, its baseline at y."""
        width = len(text) * size * LETTER
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        assert 0 <= left <= self.width - width, f"{text!r} leaves the picture"
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with a head at the last."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#head)"{dashes}/>'
        )

    def svg(self) -> str:
        """The file's text."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
                f' height="{self.height}" font-family="Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{head}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="6" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def bit_layouts() -> Drawing:
    """Sign, exponent and mantissa of five formats, drawn to scale."""
    rows: list[tuple[str, NumberFormat]] = [
        ("fp32", FP32), ("bf16", BF16), ("fp16", FP16), ("fp8 e4m3", FP8_E4M3FN), ("fp8 e5m2", FP8_E5M2)
    ]  # fmt: skip
    picture = Drawing(840, 290, "Bits of fp32, bf16, fp16, fp8 e4m3 and fp8 e5m2: sign, exponent and mantissa")
    bit, left = 14, 84
    for x, text in ((600, "largest"), (685, "smallest normal"), (826, "step at 1")):
        picture.words(x, 26, text, size=12, anchor="end" if x == 826 else "middle", bold=True)
    for index, (name, layout) in enumerate(rows):
        y = 40 + 42 * index
        picture.words(left - 10, y + 19, name, anchor="end", bold=True)
        x = left
        for bits, colour in ((1, GREY), (layout.exponent_bits, ORANGE), (layout.mantissa_bits, BLUE)):
            for _ in range(bits):
                picture.box(x, y, bit, 28, colour)
                x += bit
        largest = f"{layout.largest_finite:.2e}" if layout.largest_finite > 1e6 else f"{layout.largest_finite:,.0f}"
        picture.words(600, y + 19, largest, anchor="middle")
        picture.words(685, y + 19, f"{layout.smallest_normal:.1e}", anchor="middle")
        picture.words(826, y + 19, f"2\u207b{str(layout.mantissa_bits).translate(RAISED)}", anchor="end")
    for x, colour, text in ((84, GREY, "sign"), (160, ORANGE, "exponent: range"), (310, BLUE, "mantissa: precision")):
        picture.box(x, 258, 14, 14, colour)
        picture.words(x + 20, 270, text, size=12)
    picture.words(826, 270, "step at 1: distance from 1 to the next number", size=12, anchor="end")
    return picture


def master_weights() -> Drawing:
    """One step of MasterWeightsPrecision, and what is stored between two of them."""
    picture = Drawing(840, 330, "One training step with 16-bit copies of fp32 weights")
    picture.box(20, 40, 160, 60, BLUE, "lent copies|16 bit")
    picture.box(240, 40, 160, 60, GREY, "forward, backward|16 bit")
    picture.box(460, 40, 160, 60, BLUE, "gradients|16 bit")
    picture.box(460, 150, 160, 60, ORANGE, "gradients, fp32|unscaled, clipped")
    picture.box(240, 150, 160, 60, ORANGE, "optimizer step|fp32")
    picture.box(20, 150, 160, 60, ORANGE, "parameters|fp32")
    picture.box(660, 150, 160, 60, ORANGE, "moments|fp32")
    picture.arrow((180, 70), (238, 70))
    picture.arrow((400, 70), (458, 70))
    picture.arrow((540, 100), (540, 148))
    picture.arrow((460, 180), (402, 180))
    picture.arrow((240, 180), (182, 180))
    picture.arrow((740, 210), (740, 230), (320, 230), (320, 212))
    picture.arrow((100, 150), (100, 102))
    picture.words(108, 130, "cast once per window", size=12)
    picture.words(548, 130, "copied for the step only", size=12)
    picture.words(
        20, 262, 'storage="remainder": between steps a weight is its bf16 copy and the 16 bits that it lacks', size=12
    )
    for index in range(32):
        picture.box(20 + 16 * index, 274, 16, 24, BLUE if index < 16 else PURPLE)
    picture.words(148, 316, "copy, bf16", size=12, anchor="middle")
    picture.words(404, 316, "remainder", size=12, anchor="middle")
    picture.words(545, 291, "= fp32 weight, to the last bit", size=12)
    return picture


def optimizer_step() -> Drawing:
    """Where unscaling, normalising, the check, clipping and the skip sit in a step, and what hooks see."""
    picture = Drawing(
        840, 400, "From the end of backward to the update of the loss scale, with a fused and another optimizer"
    )
    picture.box(20, 30, 130, 60, GREY, "backward|on scaled loss")
    picture.box(190, 30, 180, 60, BLUE, "read gradients once|norm, sum over ranks")
    picture.box(410, 30, 190, 60, ORANGE, "factor: unscale, 1 / scale;|normalise, 1 / tokens")
    picture.box(640, 30, 180, 60, RED, "check: skip or step?|clip: into the factor")
    for x in (150, 370, 600):
        picture.arrow((x, 60), (x + 38, 60))
    picture.arrow((730, 90), (730, 120), (210, 120), (210, 148))
    picture.arrow((630, 120), (630, 148))
    picture.words(20, 168, "fused", bold=True)
    picture.words(440, 168, "other", bold=True)
    picture.box(
        90, 150, 330, 70, GREEN, "the optimizer's kernel multiplies by the factor,|or skips; the host waits for nothing"
    )
    picture.box(500, 150, 320, 70, GREEN, "the host waits for the check;|gradients times factor, then step, or skip")
    picture.arrow((255, 220), (255, 248))
    picture.arrow((660, 220), (660, 248))
    picture.box(90, 250, 330, 60, PURPLE, "report one step later: StepOutcome,|scheduler and averages stay on a skip")
    picture.box(500, 250, 320, 60, PURPLE, "report at once: StepOutcome,|scheduler and averages stay on a skip")
    picture.arrow((420, 280), (440, 280), (440, 330))
    picture.arrow((500, 280), (480, 280), (480, 330))
    picture.box(320, 332, 280, 30, GREY, "update the loss scale")
    picture.words(20, 382, "on_after_backward sees gradients times the loss scale.", size=12)
    picture.words(820, 382, "on_before_optimizer_step sees true gradients.", size=12, anchor="end")
    return picture


def accumulation_window() -> Drawing:
    """Two windows on two ranks, the second one short."""
    picture = Drawing(840, 300, "Two accumulation windows on two ranks: micro-batches are weighted by their tokens")
    tokens = {"rank 0": ((8, 6, 7), (5, 8)), "rank 1": ((4, 8, 3), (8, 7))}
    picture.words(265, 28, "window of 3 micro-batches", anchor="middle", bold=True)
    picture.words(625, 28, "last window: 2", anchor="middle", bold=True)
    for row, (rank, windows) in enumerate(tokens.items()):
        y = 46 + 60 * row
        picture.words(20, y + 26, rank, bold=True)
        for x0, window in zip((90, 510), windows, strict=True):
            for index, number in enumerate(window):
                picture.box(x0 + 120 * index, y, 110, 42, BLUE, f"{number} tokens")
    sums = [sum(sum(windows[index]) for windows in tokens.values()) for index in range(2)]
    for x, w, total in ((90, 350, sums[0]), (510, 230, sums[1])):
        picture.arrow((x + w / 2, 148), (x + w / 2, 172))
        picture.box(
            x, 174, w, 54, ORANGE, f"one all-reduce: sum of gradients,|{total} tokens; gradient = sum / {total}"
        )
        picture.arrow((x + w / 2, 228), (x + w / 2, 246))
        picture.box(x, 248, w, 32, GREEN, "one optimizer step")
    return picture


def wings() -> Drawing:
    """The packages by wing, each above what it imports."""
    picture = Drawing(840, 300, "The wings of the package: ground, training, monitors, planning, pipeline, examples")
    for x, y, w, h, colour, name, packages in (
        (20, 20, 800, 34, PALE, "examples", "demo, language_model"),
        (20, 62, 390, 34, PURPLE, "planning", "planning, cli"),
        (20, 104, 390, 52, ORANGE, "monitors", "diagnostics, metrics, step_memory,|preflight_checks, comparison"),
        (430, 62, 390, 94, RED, "pipeline", "pipelining"),
        (
            *(20, 164, 800, 68, BLUE, "training"),
            "precision, optimizer_step, gradients, accumulation, tokens, policy, optimizers,|distributed,"
            " tensor_parallel, checkpoints, resume, activation_checkpointing, lr_schedule;|callbacks and strategies",
        ),
        (20, 240, 800, 34, GREY, "ground", "core, modules, flops"),
    ):
        picture.box(x, y, w, h, colour)
        picture.words(x + 12, y + h / 2 + 5, name, bold=True)
        lines = packages.split("|")
        for index, line in enumerate(lines):
            picture.words(x + 110, y + h / 2 + 5 + 17 * (index - (len(lines) - 1) / 2), line, size=12)
    picture.words(820, 292, "Imports go down only.", size=12, anchor="end")
    return picture


SHARDS: dict[str, tuple[str, Callable[[int, int, int, int], bool]]] = {
    "DDP": ("gradients are averaged", lambda rank, layer, row, column: True),
    "FSDP2Strategy()": ("a layer is gathered when it is used", lambda rank, layer, row, column: row == rank),
    "FSDP2Strategy(replicate_size=2)": (
        "the same in each half; gradients are averaged",
        lambda rank, layer, row, column: row // 2 == rank % 2,
    ),
    "FSDP2Strategy(tensor_parallel_size=4)": (
        "activations are added up in each layer",
        lambda rank, layer, row, column: column == rank,
    ),
    "FSDP2Strategy(tensor_parallel_size=2)": (
        "columns by tensor parallelism, rows by FSDP2",
        lambda rank, layer, row, column: row // 2 == rank // 2 and column // 2 == rank % 2,
    ),
    "PipelineParallelStrategy(stages=4)": (
        "activations go from stage to stage",
        lambda rank, layer, row, column: layer == rank,
    ),
    "PipelineParallelStrategy(stages=2)": (
        "each stage twice; gradients are averaged",
        lambda rank, layer, row, column: layer // 2 == rank // 2,
    ),
}
"""By strategy: what is sent, and whether a rank holds a part of a layer, by sixteenths in four rows and columns."""


def sharding() -> Drawing:
    """Which part of four layers each of four ranks holds, by strategy."""
    picture = Drawing(
        840, 40 + 62 * len(SHARDS), "What each of four ranks holds of a model of four layers, by strategy"
    )
    for rank in range(4):
        picture.words(401 + 120 * rank, 24, f"rank {rank}", size=12, anchor="middle", bold=True)
    for index, (name, (sent, holds)) in enumerate(SHARDS.items()):
        y = 40 + 62 * index
        picture.words(16, y + 18, name, bold=True)
        picture.words(16, y + 36, sent, size=12)
        for rank in range(4):
            for layer in range(4):
                x = 350 + 120 * rank + 26 * layer
                picture.box(x, y, 24, 44, PALE)
                for row, column in product(range(4), repeat=2):
                    if holds(rank, layer, row, column):
                        picture.part(x + 6 * column, y + 11 * row, 6, 11, BLUE)
    return picture


DRAWINGS = (bit_layouts, master_weights, optimizer_step, accumulation_window, sharding, wings)


def files() -> dict[str, str]:
    """Every drawing's file name and text."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in DRAWINGS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(FOLDER.joinpath(name).relative_to(Path.cwd()))
