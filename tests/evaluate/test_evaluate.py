"""The evaluation job on a small random model: full reads equal dense attention, and results are replaced as a whole."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch.nn import functional as F

from msattn.trainer import artifacts, data, models
from msattn.trainer.attach import attach
from msattn.trainer.config import (
    ArtifactsConfig,
    DataConfig,
    EvalConfig,
    EvalRunConfig,
    GateConfig,
    ModelConfig,
    NeedleConfig,
    PerplexityConfig,
    RecallConfig,
    SelectConfig,
    TopKConfig,
    TrackerConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate import methods, needle, perplexity, recall
from msattn.trainer.evaluate.row import WINDOW
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.models.loading import Loaded
from msattn.trainer.models.tap import LayerInputs, dense_attention, tap
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.seer.calibrate import calibrate
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.select import Quest, Selection
from tests.factory import tiny_architecture, tiny_model

BUCKETS = 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a text of plain words, the haystack."""
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "river", "ran", "past", "an", "old", "mill", "and", "nobody", "knew", "where", "it", "came", "from"]
    (folder / "essay.txt").write_text(" ".join(words[i * i % len(words)] for i in range(4000)), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A random Llama of two layers with the embedded model's tokenizer."""
    cfg = ModelConfig(name="rand", path="embedded", init="random", architecture=tiny_architecture(vocab_size=4096))
    return Loaded(tiny_model(vocab_size=4096), (found := models.load(cfg, device="cpu")).tokenizer, found.fingerprint)


def config(outputs: Path, text: str, **changes: object) -> EvalRunConfig:
    """A small configuration; ``changes`` replace fields of ``eval``."""
    tasks = EvalConfig(
        perplexity=PerplexityConfig(length=160, num_chunks=3, sparsities=[0.0, 0.6]),
        recall=RecallConfig(length=160, num_chunks=2, num_queries=8, sparsities=[0.0, 0.6], probes=[0, 1, BUCKETS]),
        needle=NeedleConfig(lengths=[192], depths=[0.0, 0.5], samples=2, sparsities=[0.0, 0.6], probes=[0, BUCKETS]),
    )
    return EvalRunConfig(
        model=ModelConfig(name="rand", path="embedded", init="random", architecture=tiny_architecture(vocab_size=4096)),
        data=DataConfig(source="text", path=text, seq_len=160),
        tracker=TrackerConfig(kind="none"),
        outputs=str(outputs),
        device="cpu",
        select=SelectConfig(block_size=16, dense_below=10**6),  # an evaluation ignores dense_below
        eval=replace(tasks, **changes),
        recent=16,
        sink=1,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with an untrained gate and random centroids for the model of :func:`config`."""
    outputs = tmp_path_factory.mktemp("outputs")
    model = models.load(config(outputs, "unused").model, device="cpu")
    gate = Gate.build(model.model.config, GateConfig(block_size=16))
    centroids = F.normalize(torch.randn(2, 2, BUCKETS, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    shared = {"config": {}, "model": model.fingerprint, "data": "none", "seed": 0, "metrics": {}}
    folder = {kind: artifacts.artifact_folder(outputs, "rand", "base", kind) for kind in ("gate", "kmeans")}
    artifacts.write(folder["gate"], kind="gate", tensors=gate.state_dict(), details=gate.details(), **shared)
    details = {"layers": [0, 1], "rope": False}
    artifacts.write(folder["kmeans"], kind="kmeans", tensors={"centroids": centroids}, details=details, **shared)
    return outputs


def test_all_tasks_with_artifacts(trained: Path, text: str) -> None:
    cfg = config(trained, text, baselines=["oracle", "sink_local"])
    folder = evaluate(cfg)
    assert folder == trained / "rand" / "base" / "eval"
    written = {path.name for path in folder.iterdir()}
    names = ["tradeoff", "perplexity", "recall", "recall_heads", "recall_maps", "recall_decoded", "needle", "needle_grid"]
    figures = {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert written == figures | {"results.json", "results.csv", "report.html", "metrics.jsonl"}

    results = json.loads((folder / "results.json").read_text())
    assert results["config"] == json.loads(json.dumps(asdict(cfg)))
    assert set(results["artifacts"]) == {"gate", "kmeans"}
    rows = {(row["task"], row["method"], row["setting"]): row for row in results["rows"]}
    assert len(rows) == len(results["rows"])

    for method in ("gate", "oracle", "sink_local"):  # at sparsity 0 equal to dense attention
        full = rows["perplexity", method, "sparsity 0"]
        assert full["ratio_to_dense"] == pytest.approx(1, abs=1e-5)
        assert full["recall"] == pytest.approx(1, abs=1e-5)
        assert full["sparsity"] == 0
        assert rows["recall", method, "sparsity 0"]["score"] == pytest.approx(1, abs=1e-5)
        assert rows["recall", method, "sparsity 0"]["extra"]["output_error"] < 1e-9
        part = rows["recall", method, "sparsity 0.6"]
        assert 0.2 < part["selectivity"] < 0.6
        assert part["sparsity"] == pytest.approx(rows["perplexity", method, "sparsity 0.6"]["sparsity"], abs=1e-6)
    scores = {method: rows["recall", method, "sparsity 0.6"]["score"] for method in ("oracle", "sink_local")}
    assert scores["sink_local"] < scores["oracle"] < 1

    for routing in ("k-means", "oracle routing"):  # with all buckets equal to dense attention
        every = rows["recall", routing, f"{BUCKETS} probes"]
        assert every["score"] == pytest.approx(1, abs=1e-5)
        assert every["selectivity"] == pytest.approx(1)
        assert every["extra"]["layers"] == [1]
    one = {routing: rows["recall", routing, "1 probe"] for routing in ("k-means", "oracle routing")}
    assert rows["recall", WINDOW, "0 probes"]["score"] < one["oracle routing"]["score"] < 1
    assert one["k-means"]["score"] <= one["oracle routing"]["score"]
    assert rows["needle", "k-means", f"{BUCKETS} probes"]["selectivity"] == pytest.approx(1)
    window = rows["needle", WINDOW, "0 probes"]["selectivity"]
    assert 17 / 192 < window < 80 / 192  # sink, recent, and decoded tokens that are in no bucket list yet
    assert all(row["latency_s"] > 0 and row["peak_memory_mb"] > 0 for key, row in rows.items() if key[0] != "recall")


def test_baselines_run_without_artifacts(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(tmp_path, text, tasks=["perplexity"], baselines=["mean_pool"])
    results = json.loads((evaluate(cfg) / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["dense", "mean_pool", "mean_pool"]
    assert [note.split()[1] for note in results["notes"]] == ["gate", "kmeans", "qmodel"]
    shown = capsys.readouterr().out
    assert "msattn train-gate --model" in shown
    assert "mean pooling" in shown


def test_a_rerun_keeps_earlier_results_unless_overwrite(tmp_path: Path, text: str) -> None:
    cfg = config(tmp_path, text, tasks=["perplexity"], baselines=[])
    folder = evaluate(cfg)
    evaluate(cfg)
    kept = {path.name for path in folder.parent.iterdir()}
    assert len(kept) == 2
    assert all(name.startswith("eval") for name in kept)
    evaluate(replace(cfg, overwrite=True))
    assert {path.name for path in folder.parent.iterdir()} == kept


def test_a_failed_run_keeps_earlier_results(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, text, tasks=["perplexity"], baselines=[])
    before = (evaluate(cfg) / "results.json").read_bytes()
    monkeypatch.setattr("msattn.trainer.evaluate.report.files.page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(cfg)
    assert {path.name for path in (tmp_path / "rand" / "base").iterdir()} == {"eval"}
    assert (tmp_path / "rand" / "base" / "eval" / "results.json").read_bytes() == before


@pytest.mark.parametrize("question", ["dense", "sparse"])
def test_routing_with_all_buckets_predicts_as_dense(loaded: Loaded, trained: Path, text: str, question: str) -> None:
    cfg = config(trained, text)
    cfg = replace(cfg, eval=replace(cfg.eval, needle=replace(cfg.eval.needle, question=question, needles=3)))
    samples = needle.make_samples(cfg, loaded.tokenizer, needle.read_haystack(cfg, loaded.tokenizer), 192)
    found = methods.find_methods(cfg, models.load(cfg.model, device="cpu"), torch.device("cpu"))
    routing = replace(found.bucket_routings[0], dense_layers=())
    routing.router.artifact = None  # skips the check of the model: this one has other weights
    dense = needle.prefill_samples(loaded, samples, lambda: None)
    plan = {"all": BUCKETS, "none": 0, "all again": BUCKETS}
    routed = needle.decode_samples(loaded, samples, routing, plan, lambda: None)
    assert torch.equal(routed["all"].predicted, dense.predicted)
    assert torch.equal(routed["all again"].predicted, dense.predicted)  # the shared cache is unchanged
    assert routed["all"].selectivity == pytest.approx(1)
    assert (routed["none"].selectivity or 1) < 0.5


def test_samples_contain_the_needle_once(loaded: Loaded, tmp_path: Path, text: str) -> None:
    cfg = config(tmp_path, text)
    haystack = needle.read_haystack(cfg, loaded.tokenizer)
    samples = needle.make_samples(cfg, loaded.tokenizer, haystack, 192)
    again = needle.make_samples(cfg, loaded.tokenizer, haystack, 192)
    assert torch.equal(samples.ids, again.ids)
    assert samples.ids.shape == (4, 192)
    assert samples.depths == [0.0, 0.0, 0.5, 0.5]
    for ids, answers in zip(samples.ids, samples.answers, strict=True):
        answer = str(loaded.tokenizer.decode(ids[-answers:])).strip()
        assert answer.isdigit()
        assert len(answer) == 5
        assert loaded.tokenizer.decode(ids[:-answers]).count(answer) == 1
    asked = [str(loaded.tokenizer.decode(ids[-samples.decoded :])) for ids in samples.ids]
    for text, question in zip(asked, ("hidden token", "agent", "chest named", "ledger"), strict=True):
        assert question in text  # held-out wordings, in turn
    right = samples.ids[:, -samples.longest :].clone()
    assert samples.found(right) == [True] * 4
    right[2, -1] += 1
    assert samples.found(right) == [True, True, False, True]


def test_losses_in_pieces_equal_the_models_losses(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "LOGIT_ROWS", 7)
    ids = torch.randint(1, 4096, (60,), generator=torch.Generator().manual_seed(0))
    losses = torch.cat(list(perplexity.token_losses(loaded, perplexity.prefill(loaded, ids), ids)))
    logits = loaded.model(ids[None]).logits[0]
    torch.testing.assert_close(losses, F.cross_entropy(logits[:-1], ids[1:], reduction="none"))


def test_recall_of_perplexity_rows_is_the_mean_over_chunks(loaded: Loaded, tmp_path: Path, text: str) -> None:
    cfg = config(tmp_path, text, baselines=["sink_local"])
    found = methods.find_methods(cfg, loaded, torch.device("cpu"))
    (row,) = [row for row in perplexity.run(loaded, cfg, found, Progress(disable=True)) if row.setting == "sparsity 0.6"]
    ((_, select),) = found.block_selections[0].settings([0.6])
    shares = []
    texts = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, seq_len=160, num_chunks=3)
    for number in range(len(texts)):
        with found.block_selections[0].attach(loaded.model, select, measure_recall=True) as sparse:
            perplexity.prefill(loaded, texts[number]["input_ids"])
            shares.append(sparse.stats()["recall"])
    assert len(set(shares)) == row.samples == 2
    assert row.recall == pytest.approx(sum(shares) / 2)


def test_recall_of_a_method_does_not_depend_on_other_methods(loaded: Loaded, tmp_path: Path, text: str) -> None:
    """Every method reads the inputs of the dense model."""
    cfg = config(tmp_path, text)
    found = methods.calibrate_baselines(methods.find_methods(cfg, loaded, torch.device("cpu")), cfg, loaded)
    rows = recall.run(loaded, cfg, found, Progress(disable=True))
    alone = recall.run(loaded, cfg, replace(found, block_selections=found.block_selections[-1:]), Progress(disable=True))
    by_name = {(row.method, row.setting): row for row in rows}
    assert [row.score for row in alone] == [by_name[row.method, row.setting].score for row in alone]
    heads = torch.tensor(alone[-1].extra["heads"])
    assert heads.shape == (2, 4)
    assert alone[-1].score == pytest.approx(heads.mean().item(), abs=1e-6)


def test_probes_of_each_query_head(trained: Path, text: str) -> None:
    """With independent probes the mass is that of dense attention in the window and the best bucket of each head."""
    cfg = config(trained, text)
    cfg = replace(cfg, dense_layers=[], eval=replace(cfg.eval, recall=replace(cfg.eval.recall, num_chunks=1, independent=True)))
    loaded = models.load(cfg.model, device="cpu")
    found = methods.find_methods(cfg, loaded, torch.device("cpu"))
    (routing,) = found.bucket_routings
    rows = recall.run(loaded, cfg, replace(found, block_selections=[]), Progress(disable=True))
    by_name = {(row.method, row.setting): row for row in rows}
    every = by_name["k-means, independent", f"{BUCKETS} probes"]
    assert every.score == pytest.approx(1, abs=1e-5)
    assert every.selectivity == pytest.approx(1)
    assert ("k-means, independent", "0 probes") not in by_name

    expected: dict[int, torch.Tensor] = {}

    def dense_attention_with_expected_mass(x: LayerInputs) -> torch.Tensor:
        positions = torch.linspace(routing.recent + routing.sink, x.num_keys - 1, cfg.eval.recall.num_queries).round().long()
        k = x.k.repeat_interleave(2, 1)[0]
        seen = torch.arange(x.num_keys) <= positions[:, None]
        weights = (x.q[0, :, positions] @ k.mT * x.scale).masked_fill(~seen, -torch.inf).softmax(-1)  # [Hq, n, M]
        assert isinstance(routing.router, KMeans)
        centroids = routing.router.centroids[x.layer].repeat_interleave(2, 0)
        probe = (x.q_nope[0, :, positions] @ centroids.mT).argmax(-1)
        buckets = routing.router.assign(x.layer, x.k_nope, x.k)[0].repeat_interleave(2, 0)
        inside = (torch.arange(x.num_keys) < routing.sink) | (torch.arange(x.num_keys) > positions[:, None] - routing.recent)
        read = inside | (buckets[:, None] == probe[..., None])
        expected[x.layer] = (weights * read).sum(-1).mean(-1)
        return dense_attention(x)

    chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, seq_len=160, num_chunks=1)
    with torch.inference_mode(), tap(loaded.model, dense_attention_with_expected_mass):
        perplexity.prefill(loaded, chunks[0]["input_ids"])
    heads = torch.tensor(by_name["k-means, independent", "1 probe"].extra["heads"])
    torch.testing.assert_close(heads, torch.stack([expected[0], expected[1]]), rtol=1e-4, atol=1e-5)
    shared = torch.tensor(by_name["k-means", "1 probe"].extra["heads"])
    assert not torch.allclose(heads, shared)
    oracle = [by_name[f"oracle routing{kind}", "1 probe"].score for kind in (", independent", "")]
    assert oracle[0] > oracle[1]


def test_named_artifacts(trained: Path, text: str) -> None:
    """A given k-means is compared with the k-means of this name; a given gate replaces the gate of this name."""
    cfg = config(trained, text)
    loaded, folder = models.load(cfg.model, device="cpu"), trained / "rand" / "base"
    own = artifacts.read(folder / "kmeans")
    facts = {key: own.manifest[key] for key in ("model", "data", "seed", "metrics")}
    details = {"layers": [0, 1], "rope": True}
    roped = artifacts.write(
        trained / "rand" / "roped" / "kmeans", kind="kmeans", tensors=own.tensors, config={}, details=details, **facts
    )
    for named, names in (
        (ArtifactsConfig(), ["k-means"]),
        (ArtifactsConfig(gate=str(folder / "gate"), kmeans=str(folder / "kmeans")), ["k-means"]),
        (ArtifactsConfig(kmeans=str(roped)), ["k-means", "k-means (named), RoPE"]),
    ):
        found = methods.find_methods(replace(cfg, artifacts=named), loaded, torch.device("cpu"))
        assert [routing.name for routing in found.bucket_routings] == names
        assert found.block_selections[0].name == "gate"
        assert [note.split()[1] for note in found.notes] == ["qmodel"]


def test_baselines_are_calibrated_on_training_chunks(loaded: Loaded, trained: Path, text: str) -> None:
    cfg = config(trained, text, baselines=["quest", "random"])
    cfg = replace(cfg, select=SelectConfig("calibrated", block_size=16))
    found = methods.calibrate_baselines(methods.find_methods(cfg, loaded, torch.device("cpu")), cfg, loaded)
    quest = next(method for method in found.block_selections if method.name == "quest")
    train = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=4)
    expected = calibrate(Quest(16), loaded.model, [train[i] for i in range(len(train))])
    assert quest.thresholds == expected
    ((label, select),) = quest.settings([0.6])
    assert label == "sparsity 0.6"
    ids = train[0]["input_ids"]
    with quest.attach(loaded.model, select) as sparse:
        perplexity.prefill(loaded, ids)
        calibrated = sparse.stats()["sparsity"]
    by_hand = Selection.from_config(select, thresholds=expected)
    with attach(loaded.model, select=by_hand) as sparse:
        perplexity.prefill(loaded, ids)
        assert sparse.stats()["sparsity"] == calibrated
    topk = replace(cfg, select=SelectConfig("topk", block_size=16))
    assert all(method.thresholds is None for method in methods.find_methods(topk, loaded, torch.device("cpu")).block_selections)
    decoding = replace(cfg, eval=replace(cfg.eval, tasks=["decoding"]))
    assert (
        methods.calibrate_baselines(untouched := methods.find_methods(cfg, loaded, torch.device("cpu")), decoding, loaded)
        is untouched
    )


def test_rows_of_calibrated_baselines_keep_their_names(tmp_path: Path, text: str) -> None:
    cfg = config(tmp_path, text, tasks=["perplexity", "recall"], baselines=["quest"])
    cfg = replace(cfg, select=SelectConfig("calibrated", block_size=16))
    rows = json.loads((evaluate(cfg) / "results.json").read_text())["rows"]
    settings = {(row["task"], row["setting"]) for row in rows if row["method"] == "quest"}
    assert settings == {(task, f"sparsity {s}") for task in ("perplexity", "recall") for s in ("0", "0.6")}


def test_policies_without_sparsity_have_one_setting(tmp_path: Path, text: str) -> None:
    cfg = replace(config(tmp_path, text, baselines=["oracle"]), select=SelectConfig(policy="nucleus", mass=0.8, block_size=16))
    block = methods.BlockSelectionMethod("oracle", replace(cfg.select, scores="oracle"))
    assert block.settings([0.5, 0.9]) == [("nucleus 0.8", block.select)]


def test_multiscale_is_compared_with_topk_of_as_many_tokens(tmp_path: Path, text: str) -> None:
    select = SelectConfig(policy="multiscale", shares=[0.2, 0.1, 0.2, 0.4], block_size=16)
    evaluated = replace(config(tmp_path, text, tasks=["perplexity"], baselines=["oracle"]), select=select)
    (multiscale, zooms), (whole, topk) = methods.BlockSelectionMethod("oracle", replace(select, scores="oracle")).settings(
        [0.5]
    )
    assert (multiscale, whole) == ("shares 0.2 0.1 0.2 0.4", "sparsity 0.65")
    assert zooms == replace(select, scores="oracle")
    assert isinstance(topk, TopKConfig)
    assert topk.sparsity == pytest.approx(0.65)
    results = json.loads((evaluate(evaluated) / "results.json").read_text())
    rows = [row for row in results["rows"] if row["method"] == "oracle"]
    assert [row["setting"] for row in rows] == [multiscale, whole]
    assert rows[0]["sparsity"] == pytest.approx(rows[1]["sparsity"], abs=0.1)  # short rows round their shares
    assert rows[0]["score"] != rows[1]["score"]


def test_user_errors(trained: Path, text: str, tmp_path: Path) -> None:
    cfg = config(trained, text)
    long = replace(cfg.eval, tasks=["perplexity"], perplexity=replace(cfg.eval.perplexity, length=512))
    with pytest.raises(UserError, match="512"):
        evaluate(replace(cfg, eval=long))
    many = replace(cfg.eval, tasks=["needle"], baselines=[], needle=replace(cfg.eval.needle, probes=[BUCKETS + 1]))
    with pytest.raises(UserError, match=f"probes={BUCKETS + 1}"):
        evaluate(replace(cfg, eval=many))
    short = replace(cfg.eval, tasks=["needle"], baselines=[], needle=replace(cfg.eval.needle, lengths=[24]))
    with pytest.raises(UserError, match="lengths=24"):
        evaluate(replace(cfg, eval=short))
    with pytest.raises(UserError, match="no such folder"):
        evaluate(replace(cfg, artifacts=ArtifactsConfig(gate=str(tmp_path / "nowhere"))))
    deeper = replace(cfg.model, architecture={**(cfg.model.architecture or {}), "num_hidden_layers": 3})
    with pytest.raises(UserError, match="its num_layers is 2"):
        evaluate(replace(cfg, model=deeper))
    other_weights = models.load(cfg.model, device="cpu", seed=1)
    notes = methods.find_methods(cfg, other_weights, torch.device("cpu")).notes
    assert any("its weights_hash is" in note for note in notes)
    with pytest.raises(UserError, match="sparsities"):
        PerplexityConfig(sparsities=[1.0])
    with pytest.raises(UserError, match="compare=nowhere: accepted is the folder of an earlier"):
        evaluate(replace(cfg, compare="nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="outputs"):
        evaluate(replace(cfg, outputs=str(tmp_path / "file")))


def test_evaluation_reads_only_held_out_documents(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 300)
    cfg = replace(config(tmp_path / "out", str(tmp_path)), data=DataConfig("text", path=str(tmp_path), seq_len=64))
    trained_on = {d.name for d in data.documents(cfg.data, heldout=False)}
    seen: set[str] = set()

    def watched(source: DataConfig, *, heldout: bool) -> Iterator[data.Document]:
        for document in documents(source, heldout=heldout):
            seen.add(document.name)
            yield document

    documents = data.documents
    monkeypatch.setattr(data, "documents", watched)
    evaluate(replace(cfg, eval=replace(cfg.eval, tasks=["perplexity", "recall", "needle"])))
    assert seen
    assert not seen & trained_on


def test_classifiers_are_measured_at_shares_of_the_keys(loaded: Loaded, trained: Path, text: str, tmp_path: Path) -> None:
    """Classifiers without thresholds are calibrated; the share that is read beside the window is about the requested one."""
    partition, folder = KMeans.load(trained / "rand" / "base" / "kmeans"), tmp_path / "qmodel"
    details = {"layers": [0, 1], "rope": False}
    facts: dict[str, Any] = {"config": {}, "model": loaded.fingerprint, "data": "none", "seed": 0, "metrics": {}}
    tensors = dict(QModel(partition, 2, 8).state_dict())
    artifacts.write(folder, kind="qmodel", tensors=tensors, details=details, **facts)
    cfg = config(trained, text, tasks=["recall", "needle"], baselines=[])
    tasks = replace(
        cfg.eval,
        recall=replace(cfg.eval.recall, probes=[0], keys=[0.1, 0.5], sparsities=[], independent=True),
        needle=replace(cfg.eval.needle, probes=[0], keys=[0.5], sparsities=[], independent=True),
    )
    cfg = replace(cfg, eval=tasks, artifacts=ArtifactsConfig(qmodel=str(folder)), keys=0.2)
    found = methods.find_methods(cfg, loaded, torch.device("cpu"))
    methods.calibrate_routers(found, cfg, loaded)
    classifier, kmeans = found.bucket_routings
    assert classifier.own_settings() == [("20 % of far keys", 0.2)]
    assert kmeans.own_settings() == [("4 probes", 4)]
    assert kmeans.settings([1], [0.5]) == [("1 probe", 1)]
    assert "classifier: its artifact holds no thresholds" in found.notes[-1]

    rows = {(row.method, row.setting): row for row in recall.run(loaded, cfg, found, Progress(disable=True))}
    name = "classifier, calibrated"
    assert set(rows) == {(name, "10 % of far keys"), (name, "50 % of far keys"), (WINDOW, "0 probes")}
    window = rows[WINDOW, "0 probes"].selectivity
    few, many = (rows[name, f"{share} % of far keys"] for share in (10, 50))
    assert window is not None
    assert few.selectivity is not None
    assert many.selectivity is not None
    assert window < few.selectivity < many.selectivity < 1
    assert rows[WINDOW, "0 probes"].score < few.score < many.score
    assert (many.selectivity - window) / (1 - window) == pytest.approx(0.5, abs=0.15)
    asked = [(row.method, row.setting) for row in needle.run(loaded, cfg, found, Progress(disable=True))]
    share = "50 % of far keys"
    assert asked == [("dense", ""), (WINDOW, "0 probes"), (name, share), (f"{name}, independent", share)]


def test_recall_without_probes_and_without_sparsities(trained: Path, text: str) -> None:
    cfg = config(trained, text)
    loaded = models.load(cfg.model, device="cpu")
    found = methods.find_methods(cfg, loaded, torch.device("cpu"))
    none = replace(cfg.eval.recall, num_chunks=1, probes=[0], sparsities=[])
    rows = recall.run(loaded, replace(cfg, eval=replace(cfg.eval, recall=none)), found, Progress(disable=True))
    assert [(row.method, row.setting) for row in rows] == [(WINDOW, "0 probes")]


def test_recall_needs_more_keys_than_the_window(trained: Path, text: str) -> None:
    cfg = config(trained, text)
    short = replace(cfg, recent=cfg.eval.recall.length)
    with pytest.raises(UserError, match=r"eval\.recall\.length"):
        evaluate(replace(short, eval=replace(short.eval, tasks=["recall"])))
