"""SAAP's analysis: orders of keys by hashes, bins of equal size, and the program."""

import csv
import itertools

import pytest
import saap_analysis
import torch
from saap_analysis import bin_stages, kdeformer_order, reformer_order


def test_neighbors_in_kdeformers_order_differ_in_one_sign() -> None:
    signs = torch.tensor([*itertools.product((-1.0, 1.0), repeat=4)])
    places = kdeformer_order(signs, torch.eye(4))
    assert sorted(places.tolist()) == list(range(16))
    ordered = signs[places.argsort()]
    assert ((ordered[1:] != ordered[:-1]).sum(-1) == 1).all()


def test_reformers_order_is_the_nearest_direction() -> None:
    x = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [1.0, -4.0]])
    assert reformer_order(x, torch.eye(2)).tolist() == [0, 2, 3]


def test_a_query_reads_the_bin_of_its_equals() -> None:
    keys, far = torch.tensor([5, 1, 7, 3, 2, 8, 4, 6]), torch.ones(1, 8, dtype=torch.bool)
    far[0, 0] = False
    stages = bin_stages(keys, torch.tensor([[2], [7]]), 4, far)
    assert stages.tolist() == [[[0, 1, 2, 2, 1, 2, 2, 2]], [[0, 2, 1, 2, 2, 1, 2, 2]]]
    assert (bin_stages(keys, torch.tensor([[9]]), 1, far)[0, 0, 1:] == 1).all(), (
        "one bin holds all keys"
    )


@pytest.mark.slow
def test_the_program_prints_each_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here
) -> None:
    sizes = [
        f"eval.analysis.{key}"
        for key in ("num_chunks=2", "length=512", "layers=[1]", "heads=[1]", "num_queries=8")
    ]
    monkeypatch.setattr(
        "sys.argv",
        ["saap_analysis", "artifacts.kmeans=embedded", "recent=64", "device=cpu", *sizes],
    )
    saap_analysis.main()
    rows = {
        (row["layer"], row["kv_head"], row["measure"]): float(row["value"])
        for row in csv.DictReader(capsys.readouterr().out.splitlines())
    }
    found = {
        name: value for (layer, head, name), value in rows.items() if (layer, head) == ("1", "1")
    }
    assert len(found) == len(rows)
    assert 0 < found["assigned keys"] < 1
    assert 0 < found["assigned variation"] < 1
    assert found["read reformer 64 bins"] < found["read reformer 4 bins"] < 1
    assert 0 < found["error kdeformer 4 bins"] < 2
    assert 0.5 < found["top_256"] <= 1
