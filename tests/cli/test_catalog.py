"""``pipeloom catalog``: what has a name, and where its numbers come from."""

import json

import pytest

from pipeloom.catalog import CLUSTERS, names
from pipeloom.cli import main


def test_the_tables_fit_100_columns_and_have_every_entry(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["catalog"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    first = {line.split()[0] for line in lines if line}
    assert {*CLUSTERS, *names("models"), *names("software")} <= first


@pytest.mark.parametrize(
    ("kind", "name"), [("clusters", "DGX-H100"), ("models", "Llama-3-8B"), ("programs", "general")]
)
def test_an_entry_is_printed_with_its_sources_as_a_file_that_can_be_read(capsys, kind, name):
    import tomllib

    assert main(["catalog", kind, name]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["name"] == name.lower()
    assert "#" in text or "source" in text


def test_json_has_the_numbers_in_si_units(capsys):
    assert main(["catalog", "clusters", "h200", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["peak_flops_per_s"], one["inter_bytes_per_s"]) == (989e12, 400e9)
    assert "datasheet" in one["file"]
    assert main(["catalog", "models", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["models"]) == set(names("models"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["clusters", "dgx-h10"], "there is no cluster 'dgx-h10'; did you mean 'dgx-h100'"),
        (["all", "dgx-h100"], "NAME needs a kind: pipeloom catalog clusters|models|programs dgx-h100"),
        (["clouds"], "KIND must be one of clusters, models, programs, all, found 'clouds'"),
    ],
)
def test_a_wrong_name_is_one_message(capsys, words, problem):
    assert main(["catalog", *words]) == 2
    assert problem in capsys.readouterr().err
