"""What holds for every test: few threads, no network, an own folder, CUDA tests only where there is CUDA."""

import gc
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Set before anything imports torch, and inherited by the processes that tests start. The models are
# tiny and several processes share two cores, so one thread each is the fastest choice.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tables are drawn as in a wide terminal, whatever starts the tests.
os.environ["COLUMNS"] = "200"

import hypothesis
import longest_files
import pytest
import quick_set
import repeated_work

repeated_work.read_entry_points_once()

# Nothing is timed in the tests, so no deadline; the same examples on every machine.
hypothesis.settings.register_profile("lightning_mp", deadline=None, derandomize=True)
hypothesis.settings.register_profile("lightning_mp quick", max_examples=25, deadline=None, derandomize=True)

#: Looked through for doctests it would be imported, and hide matplotlib and transformers from all tests.
collect_ignore = ["support/plain_install"]

#: What `--accelerator` moves.
ON_GPU = pytest.StashKey[Any]()
SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
FOLDER_NUMBERS = itertools.count()
RANKS = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make soak` gives these; without them the tests in tests/soak are short."""
    parser.addoption("--soak-steps", type=int, default=0, help="optimizer steps of tests/soak/test_soak.py, at least")
    parser.addoption("--every-case", action="store_true", help="all combinations of parameters, not all pairs only")
    parser.addoption(
        "--accelerator",
        choices=("gpu", "record"),
        help="Trainers of tests that ask for one CPU take the GPU; `record` says which would, and moves none",
    )
    parser.addoption("--soak-fits", type=int, default=0, help="fits in one process of tests/soak/test_many_fits.py")


@pytest.fixture
def soak_steps(request: pytest.FixtureRequest) -> int:
    """At least so many steps; 0 for a few runs."""
    return request.config.getoption("--soak-steps")


@pytest.fixture
def soak_fits(request: pytest.FixtureRequest) -> int:
    """So many fits; 0 for a few."""
    return request.config.getoption("--soak-fits")


#: For tests of the full set that name no time-out of their own; the others have that of pyproject.toml.
FULL_TIMEOUT_SECONDS = 400


def pytest_configure(config: pytest.Config) -> None:
    quick = config.option.markexpr == "not full"
    hypothesis.settings.load_profile("lightning_mp quick" if quick else "lightning_mp")
    if config.option.accelerator:
        _take_the_gpu(config)


def _take_the_gpu(config: pytest.Config) -> None:
    import torch
    from on_gpu import OnGpu

    moves = config.option.accelerator == "gpu"
    if moves and not torch.cuda.is_available():
        raise pytest.UsageError("--accelerator gpu needs a CUDA device, and torch sees none. Use --accelerator record.")
    torch.backends.cudnn.allow_tf32 = False  # references are in fp32
    config.stash[ON_GPU] = OnGpu(moves)
    context = config.stash[ON_GPU].in_force()
    context.__enter__()
    config.add_cleanup(lambda: context.__exit__(None, None, None))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Mark what is left on the CPU with `--accelerator gpu`."""
    on_gpu = item.config.stash.get(ON_GPU, None)
    if on_gpu is None:
        return
    on_gpu.begin(item.nodeid)
    marker = item.get_closest_marker("cpu_only")
    if marker is not None:
        pytest.skip(f"on the CPU only: {marker.kwargs['reason']}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what `--accelerator` has moved; with pytest-xdist the workers know it, and this process does not."""
    on_gpu = config.stash.get(ON_GPU, None)
    if on_gpu is not None and on_gpu.trainers:
        verb = "took the GPU" if on_gpu.moves else "would take the GPU"
        terminalreporter.line(f"{on_gpu.trainers.total()} Trainers of {len(on_gpu.trainers)} tests {verb}.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device, and let slow ones be slow on a slow machine."""
    longest_files.begin_with_the_longest(items)
    if not config.option.every_case:
        _leave_out_repeated_cases(config, items)
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_SECONDS))
    _most_of_a_grid_is_full(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Everything is imported: what no test looks at need not be done for each."""
    import torch

    if not torch.accelerator.is_available():
        repeated_work.seed_the_cpu_alone()
    repeated_work.attach_log_handlers_once()
    gc.collect()
    gc.freeze()  # or each collection would look through all that was imported


def _grids(items: list[pytest.Item], *, with_full: bool) -> Iterable[list[pytest.Function]]:
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        wanted = with_full or not item.get_closest_marker("full")
        if wanted and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    return tests.values()


def _leave_out_repeated_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    repeated = {case for cases in _grids(items, with_full=True) for case in quick_set.repeated_cases(cases)}
    if repeated:
        config.hook.pytest_deselected(items=[item for item in items if item in repeated])
        items[:] = [item for item in items if item not in repeated]


def _most_of_a_grid_is_full(items: list[pytest.Item]) -> None:
    for cases in _grids(items, with_full=False):
        for case in quick_set.slow_cases(cases):
            case.add_marker("full")


#: What a release of torch says when it is asked for what it lacks.
NO_ROWWISE = "torch 2.11 has no fp8 product by rows on a CPU"
LACKING = {
    ("2.11", "_scaled_mm only supports per-tensor scaling for CPU"): NO_ROWWISE,
    # our own words for the same
    ("2.11", "Float8Precision('rowwise') cannot run on cpu"): NO_ROWWISE,
    ("2.11", "only Tensors of floating point dtype can require gradients"): (
        "torch 2.11 hands tensors of floating point only from one stage of a pipeline to the next"
    ),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that asks for what this release of torch lacks."""
    try:
        return (yield)
    except Exception as error:
        import torch

        for (release, says), reason in LACKING.items():
            if torch.__version__.startswith(release + ".") and says in str(error):
                pytest.skip(reason)
        raise


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """As pytest's own, but without a link to the latest folder, which takes longer than the folder."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}-{next(FOLDER_NUMBERS)}", numbered=False)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Run each test in an empty folder: Lightning writes its logs and checkpoints where it is started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_seed_for_another_test():
    """`seed_everything` leaves its seed in the environment, and Lightning seeds the ranks of later runs with it.

    Afterwards, too: what a module's fixture starts inherits the environment before any test's fixture is asked.
    """
    for name in SEEDS:
        os.environ.pop(name, None)
    yield
    for name in SEEDS:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _no_ranks_for_another_test():
    """Lightning's launchers leave ranks, port and process group behind, and later Trainers take them for theirs."""
    before = {name: os.environ.get(name) for name in RANKS}
    yield
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Start each test from the same random state, whatever ran before it."""
    import torch

    torch.manual_seed(0)
