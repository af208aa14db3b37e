"""Recall of attention mass, as a task of its own and beside perplexity."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from msattn.trainer import data
from msattn.trainer.config import ArtifactsConfig
from msattn.trainer.evaluate import calibration, compared
from msattn.trainer.evaluate.row import WINDOW, Setting
from msattn.trainer.evaluate.tasks import needle, perplexity, recall
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.models import predictions
from msattn.trainer.models.loading import Loaded
from msattn.trainer.models.predictions import token_scores
from msattn.trainer.models.tap import LayerInputs
from tests.evaluate.runs import BUCKETS, config, loaded_and_found, measured_on_a_chunk, rows_of
from tests.sparse import save


def test_scores_in_pieces_equal_those_of_all_logits(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "LOGIT_ROWS", 7)
    ids = torch.randint(1, 4096, (60,), generator=torch.Generator().manual_seed(0))
    dense = perplexity.prefill(loaded, ids)
    other = dense + torch.randn(dense.shape, generator=torch.Generator().manual_seed(1))
    logits, changed = loaded.model(ids[None]).logits[0, :-1], loaded.model.lm_head(other)[0, :-1]
    own = token_scores(loaded.model, dense, ids)
    sparse = token_scores(loaded.model, other, ids, dense)
    torch.testing.assert_close(own.losses, F.cross_entropy(logits, ids[1:], reduction="none"))
    torch.testing.assert_close(sparse.losses, F.cross_entropy(changed, ids[1:], reduction="none"))
    divergences = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=each) for each in (logits, changed))
    )
    torch.testing.assert_close(sparse.divergences, divergences)
    assert torch.equal(sparse.agreements, (logits.argmax(-1) == changed.argmax(-1)).float())
    assert 0 < sparse.agreements.sum() < 59
    assert own.divergences.sum() == 0
    assert own.agreements.sum() == 59


def test_recall_of_perplexity_rows_is_the_mean_over_chunks(
    loaded: Loaded, tmp_path: Path, text: str
) -> None:
    cfg = config(tmp_path, text, baselines=["sink_local"])
    found = compared.find_compared(cfg, loaded)
    rows = rows_of(perplexity, loaded, cfg, found)
    (row,) = [row for row in rows if str(row.setting) == "sparsity 0.6"]
    ((_, select),) = found.block_selections[0].settings([0.6])
    shares = []
    texts = data.chunks(
        cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, seq_len=160, num_chunks=3
    )
    for number in range(len(texts)):
        with found.block_selections[0].attach(loaded.model, select, measure_recall=True) as sparse:
            perplexity.prefill(loaded, texts[number]["input_ids"])
            shares.append(sparse.stats()["recall"])
    assert len(set(shares)) == row.samples == 2
    assert row.recall == pytest.approx(sum(shares) / 2)


def test_probes_of_each_query_head(trained: Path, text: str) -> None:
    """With independent probes the mass is that of dense attention in the window and the best bucket
    of each head.
    """
    cfg = config(trained, text)
    cfg = replace(
        cfg,
        dense_layers=[],
        eval=replace(cfg.eval, recall=replace(cfg.eval.recall, num_chunks=1, independent=True)),
    )
    loaded, found = loaded_and_found(cfg)
    (routing,) = found.bucket_routings
    rows = rows_of(recall, loaded, cfg, replace(found, block_selections=[]))
    by_name = {(str(row.method), str(row.setting)): row for row in rows}
    every = by_name["k-means, independent", f"{BUCKETS} probes"]
    assert every.score == pytest.approx(1, abs=1e-5)
    assert every.selectivity == pytest.approx(1)
    assert ("k-means, independent", "0 probes") not in by_name

    expected: dict[int, torch.Tensor] = {}

    def measure(x: LayerInputs) -> None:
        positions = (
            torch.linspace(
                routing.recent + routing.sink, x.num_keys - 1, cfg.eval.recall.num_queries
            )
            .round()
            .long()
        )
        k = x.k.repeat_interleave(2, 1)[0]
        seen = torch.arange(x.num_keys) <= positions[:, None]
        # [Hq, n, M]
        weights = (x.q[0, :, positions] @ k.mT * x.scale).masked_fill(~seen, -torch.inf).softmax(-1)
        assert isinstance(routing.router, KMeans)
        centroids = routing.router.centroids[x.layer].repeat_interleave(2, 0)
        probe = (x.q_nope[0, :, positions] @ centroids.mT).argmax(-1)
        buckets = routing.router.assign(x.layer, x.k_nope, x.k)[0].repeat_interleave(2, 0)
        inside = (torch.arange(x.num_keys) < routing.sink) | (
            torch.arange(x.num_keys) > positions[:, None] - routing.recent
        )
        read = inside | (buckets[:, None] == probe[..., None])
        expected[x.layer] = (weights * read).sum(-1).mean(-1)

    measured_on_a_chunk(cfg, loaded, measure)
    heads = torch.tensor(by_name["k-means, independent", "1 probe"].extra["heads"])
    torch.testing.assert_close(heads, torch.stack([expected[0], expected[1]]), rtol=1e-4, atol=1e-5)
    shared = torch.tensor(by_name["k-means", "1 probe"].extra["heads"])
    assert not torch.allclose(heads, shared)
    oracle = [by_name[f"oracle routing{kind}", "1 probe"].score for kind in (", independent", "")]
    assert oracle[0] > oracle[1]


def test_classifiers_are_measured_at_shares_of_the_keys(
    loaded: Loaded, trained: Path, text: str, tmp_path: Path
) -> None:
    """Classifiers without thresholds are calibrated; the share that is read beside the window is
    about the requested one.
    """
    partition = KMeans.load(trained / "rand" / "base" / "kmeans")
    folder = save(tmp_path, loaded, QModel(partition, 2, 8))
    cfg = config(trained, text, tasks=["recall", "needle"], baselines=[])
    tasks = replace(
        cfg.eval,
        recall=replace(
            cfg.eval.recall, probes=[0], keys=[0.1, 0.5], sparsities=[], independent=True
        ),
        needle=replace(cfg.eval.needle, probes=[0], keys=[0.5], sparsities=[], independent=True),
    )
    cfg = replace(cfg, eval=tasks, artifacts=ArtifactsConfig(qmodel=str(folder)), keys=0.2)
    found = compared.find_compared(cfg, loaded)
    calibration.calibrate_routers(found, cfg, loaded)
    classifier, kmeans = found.bucket_routings
    assert classifier.own_settings() == [(Setting("far keys", 0.2), 0.2)]
    assert kmeans.own_settings() == [(Setting("probes", 4), 4)]
    assert kmeans.settings([1], [0.5]) == [(Setting("probes", 1), 1)]
    assert "classifier: its artifact has no thresholds" in found.notes[-1]

    rows = {(str(row.method), str(row.setting)): row for row in rows_of(recall, loaded, cfg, found)}
    name = "classifier, calibrated"
    assert set(rows) == {
        (name, "10 % of far keys"),
        (name, "50 % of far keys"),
        (str(WINDOW), "0 probes"),
    }
    nearest = (
        rows[str(WINDOW), "0 probes"],
        *(rows[name, f"{share} % of far keys"] for share in (10, 50)),
    )
    window, few, many = (row.selectivity or 1 for row in nearest)
    assert window < few < many < 1
    assert nearest[0].score < nearest[1].score < nearest[2].score
    assert (many - window) / (1 - window) == pytest.approx(0.5, abs=0.15)
    asked = [(str(row.method), str(row.setting)) for row in rows_of(needle, loaded, cfg, found)]
    share = "50 % of far keys"
    assert asked == [
        ("dense", ""),
        (str(WINDOW), "0 probes"),
        (name, share),
        (f"{name}, independent", share),
    ]


def test_recall_without_probes_and_without_sparsities(trained: Path, text: str) -> None:
    cfg = config(trained, text)
    loaded, found = loaded_and_found(cfg)
    none = replace(cfg.eval.recall, num_chunks=1, probes=[0], sparsities=[])
    rows = rows_of(recall, loaded, replace(cfg, eval=replace(cfg.eval, recall=none)), found)
    assert [(str(row.method), str(row.setting)) for row in rows] == [(str(WINDOW), "0 probes")]
