"""Runs from CSV files and records, and what is wrong with bad ones."""

from pathlib import Path

import pytest

from lightning_mp.planning.scaling_laws.runs import Run, read_runs


def csv_file(text, encoding="utf-8"):
    path = Path("runs.csv")
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    "text",
    [
        "parameters,tokens,loss\n100M,2B,3.2\n",
        "N,D,L\n1e8,2e9,3.2\n",
        "seed, Params ,note,FLOPs,Final Loss\n1,100_000_000,x,1.2e18,3.2\n",
        "\ufeffModel Size,Training Tokens,Training FLOP,loss\r\n1e8,2e9,1.3e18,3.2\r\n",
        "loss,parameters,tokens\n3.2,1e8,2e9\n\n",
        "parameters;tokens;loss;note\n100M;2B;3.2;of Monday, again\n",
        "N\tD\tloss\n1e8\t2e9\t3.2\n",
    ],
)
def test_columns_go_by_many_names(text):
    assert read_runs(csv_file(text)) == (Run(parameters=1e8, tokens=2e9, loss=3.2),)
    assert read_runs("runs.csv") == read_runs(Path("runs.csv"))


def test_records_and_runs_can_be_mixed():
    run = Run(parameters=1e8, tokens=2e9, loss=3.2)
    assert read_runs([{"N": 1e8, "D": 2e9, "loss": 3.2}, run, {"N": "100M", "C": "1.2e18", "L": "3.2"}]) == (run,) * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "runs.csv is empty. Its first line must name the columns"),
        ("N,D\n1,2\n", "runs.csv has no column loss. .* Found: N, D."),
        ("N,loss\n1,2\n", r"runs.csv has no column tokens \(or flops\)"),
        ("x,y\n1,2\n", r"no column parameters and no column loss and no column tokens \(or flops\)"),
        ("N,params,D,loss\n1,1,1,1\n", "two columns for parameters: params and n. Keep one"),
        ("N,D,loss\n1e8,2e9,3.2\n1e8,2e9,-3\n", "line 3: `loss` must be a positive finite number, got '-3'"),
        ("N,D,loss\n1e8,2e9,nan\n", "line 2: `loss` must be a positive finite number, got 'nan'"),
        ("N,D,loss\n0,2e9,3\n", "line 2: `parameters` must be a positive finite number"),
        ("N,D,loss\n1e8,,3\n", "line 2: `tokens` cannot be read, got ''"),
        ("N,D,loss\n1e8,20 billions,3\n", "line 2: `tokens` cannot be read, got '20 billions'"),
        ("N,D,loss\n1e8,2e9\n", "line 2 does not have as many values as the header: 3"),
        ("N,D,loss\n1e8,2e9,3,4\n", "line 2 does not have as many values as the header: 3"),
        ("N;D;loss\n1e8;2e9;3,2\n", "line 2: `loss` cannot be read, got '3,2'"),
        ("N,D,flops,loss\n1e8,2e9,1e21,3\n", "line 2: 1e21 FLOPs contradict 6 N D = 1.2e18"),
        ('N,D,loss\n"1e8,2e9,3\n', "is not a CSV file"),
    ],
)
def test_wrong_files_are_refused_with_the_place(text, message):
    with pytest.raises(ValueError, match=message):
        read_runs(csv_file(text))


def test_a_file_that_is_not_text_is_refused():
    with pytest.raises(ValueError, match="is not a CSV file"):
        read_runs(csv_file("N,D,loss\nä,1,1\n", encoding="latin-1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params,tokens,loss\n1.3e9,26,2.6\n", "line 2: 26 tokens are too few .* for billions write 26B or 26e9"),
        ("params,tokens,loss\n1e8,1e9,3\n5e11,15000,1.9\n", "line 3: 15000 tokens are too few"),
        ("params,tokens,loss\n125,2.5e9,3.3\n", "line 2: 125 parameters are too few .* for billions write 125B"),
        ("params,flops,loss\n1e9,6.8,2.6\n", "tokens are too few .* 1 PF-day is 8.64e19"),
        ("params,tokens,loss\n70000,1.4T,2\n", r"1.4T tokens for 70K parameters are 2e\+07 per parameter"),
    ],
)
def test_units_that_cannot_be_are_refused(text, message):
    """A fit takes tokens in billions without a word, and its optimum is off by their ninth power."""
    with pytest.raises(ValueError, match=message):
        read_runs(csv_file(text))
    header, *rows = text.split()
    records = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    with pytest.raises(ValueError, match=message.replace("line 2", "run 1").replace("line 3", "run 2")):
        read_runs(records)
