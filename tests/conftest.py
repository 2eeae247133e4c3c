"""What holds for every test: few threads, no network, an own folder, CUDA tests only where there is CUDA."""

import os

# Set before anything imports torch, and inherited by the processes that tests start. The models are
# tiny and several processes share two cores, so one thread each is the fastest choice.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tables are drawn as in a wide terminal, whatever starts the tests.
os.environ["COLUMNS"] = "200"

import hypothesis
import pytest

# Nothing is timed in the tests, so no deadline; the same examples on every machine.
hypothesis.settings.register_profile("lightning_mp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lightning_mp")

SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


#: For tests of the full set that name no time-out of their own; the others have that of pyproject.toml.
FULL_TIMEOUT_SECONDS = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device, and let slow ones be slow on a slow machine."""
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_SECONDS))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
def _same_random_numbers():
    """Start each test from the same random state, whatever ran before it."""
    import torch

    torch.manual_seed(0)
