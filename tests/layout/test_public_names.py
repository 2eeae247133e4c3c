"""Promise: what a user imports stands in one place, and `dir` shows that and nothing else."""

import importlib

import pytest

PACKAGES = ("checkpoints", "diagnostics", "metrics", "pipelining", "planning")
PUBLIC = ["lightning_mp", *(f"lightning_mp.{name}" for name in PACKAGES)]


@pytest.mark.parametrize("package", PUBLIC)
def test_dir_shows_the_public_names_only(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(set(module.__all__))
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_a_public_name_has_one_place():
    owners = {}
    for package in PUBLIC:
        for name in importlib.import_module(package).__all__:
            owners.setdefault(name, []).append(package)
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}


@pytest.mark.parametrize("package", ["lightning_mp.callbacks", "lightning_mp.strategies"])
def test_what_a_trainer_is_given_is_flat(package):
    flat = importlib.import_module("lightning_mp")
    assert set(importlib.import_module(package).__all__) <= set(flat.__all__)


def test_questions_before_a_run_are_flat_names():
    flat = importlib.import_module("lightning_mp")
    for name in ("compare_precisions", "estimate_memory", "preflight", "recommend"):
        function = getattr(flat, name)
        assert function is getattr(importlib.import_module(function.__module__), name)
    # in the message itself, as jsonargparse shows no traceback, to which Python would add it
    with pytest.raises(AttributeError, match=r"has no attribute 'preflights'\. Did you mean 'preflight'\?"):
        flat.preflights  # noqa: B018
