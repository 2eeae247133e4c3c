"""The text to train on: two parts that share nothing, and clear words about unusable input."""

import re

import pytest
import torch

from lightning_mp.language_model import Corpus, load_file, load_standard_library


def _write_library(root, num_files):
    for index in range(num_files):
        (root / f"module_{index:03}.py").write_text(f"VALUE = {index}\n")


def test_the_standard_library_is_split_into_whole_different_files(tmp_path):
    _write_library(tmp_path, 60)
    corpus = load_standard_library(tmp_path)
    train = re.findall(rb"VALUE = \d+", bytes(corpus.train.tolist()))
    held_out = re.findall(rb"VALUE = \d+", bytes(corpus.validation.tolist()))
    assert len(train) == 57
    assert held_out == [b"VALUE = 19", b"VALUE = 39", b"VALUE = 59"]
    assert not set(train) & set(held_out)


def test_files_with_the_same_content_are_on_one_side_only(tmp_path):
    _write_library(tmp_path, 19)
    # the 20th file is the one held out: a copy of the first must not get there
    (tmp_path / "module_019.py").write_text("VALUE = 0\n")
    (tmp_path / "module_020.py").write_text("VALUE = 20\n")
    corpus = load_standard_library(tmp_path)
    assert bytes(corpus.validation.tolist()) == b"VALUE = 20\n"


def test_tests_and_installed_packages_are_left_out(tmp_path):
    _write_library(tmp_path, 20)
    for folder in ("test", "site-packages", "lib2to3"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "aaa.py").write_text(f"SECRET = {folder!r}\n")
    corpus = load_standard_library(tmp_path)
    assert b"SECRET" not in bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist())


def test_reading_stops_at_the_limit(tmp_path):
    _write_library(tmp_path, 60)
    limited = load_standard_library(tmp_path, max_bytes=400)
    assert 300 < len(limited.train) + len(limited.validation) <= 400


def test_the_real_standard_library_is_read_the_same_twice():
    first, second = load_standard_library(), load_standard_library()
    assert first.digest == second.digest
    assert len(first.train) > 2_034_240, "the default budget should not need a second pass"
    assert "import" in bytes(first.validation[:100_000].tolist()).decode(errors="replace")


def test_the_digest_tells_texts_and_splits_apart():
    text = torch.arange(100, dtype=torch.uint8)
    digests = {Corpus(text[:cut], text[cut:], "").digest for cut in (90, 91)} | {Corpus(text + 1, text[:0], "").digest}
    assert len(digests) == 3


def test_a_file_of_any_bytes_keeps_order_and_holds_out_its_tail(tmp_path):
    content = bytes(range(256)) * 4
    (tmp_path / "any.bin").write_bytes(content)
    corpus = load_file(tmp_path / "any.bin")
    assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == content
    assert len(corpus.validation) == len(content) // 20


def test_a_python_without_its_source_is_refused(tmp_path):
    _write_library(tmp_path, 19)
    with pytest.raises(ValueError, match=r"holds 19 Python source files, and at least 20 .* give a file as `text`"):
        load_standard_library(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"cannot be read \(No such file or directory\): give a readable file as `text`"),
        (lambda path: path.mkdir(), r"cannot be read \(Is a directory\): give a readable file as `text`"),
        (lambda path: path.write_bytes(b""), r"is empty: give a file with some text in it as `text`"),
    ],
    ids=["missing", "folder", "empty"],
)
def test_an_unreadable_file_is_refused(tmp_path, make, message):
    path = tmp_path / "text.txt"
    make(path)
    with pytest.raises(ValueError, match=message):
        load_file(path)
