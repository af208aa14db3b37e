"""The evaluation job on a small random model: full reads equal dense attention, and results are
replaced as a whole.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from msattn.trainer import data, models
from msattn.trainer.config import ArtifactsConfig, DataConfig, LatencyConfig, ThroughputConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate import compared
from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.row import WINDOW, Setting
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks import perplexity
from msattn.trainer.evaluate.tasks.perplexity import PerplexityRun
from msattn.trainer.models.loading import Loaded
from tests.evaluate.runs import BUCKETS, config


def test_all_tasks_with_artifacts(trained: Path, text: str) -> None:
    cfg = config(trained, text, baselines=["oracle", "sink_local"])
    folder = evaluate(cfg)
    assert folder == trained / "rand" / "base" / "eval"
    written = {path.name for path in folder.iterdir()}
    names = [
        "tradeoff",
        "perplexity",
        "recall",
        "recall_heads",
        "recall_maps",
        "recall_decoded",
        "needle",
        "needle_grid",
    ]
    figures = {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert written == figures | {
        "results.json",
        "results.csv",
        "report.html",
        "metrics.jsonl",
    }

    results = json.loads((folder / "results.json").read_text())
    assert results["config"] == json.loads(json.dumps(asdict(cfg)))
    assert set(results["artifacts"]) == {"gate", "kmeans"}
    rows = {(row["task"], row["method"], row["setting"]): row for row in results["rows"]}
    assert len(rows) == len(results["rows"])

    # at sparsity 0 equal to dense attention
    for method in ("gate_question", "gate", "oracle", "sink_local"):
        full = rows["perplexity", method, "sparsity 0"]
        assert full["ratio_to_dense"] == pytest.approx(1, abs=1e-5)
        assert full["recall"] == pytest.approx(1, abs=1e-5)
        assert full["sparsity"] == 0
        assert rows["recall", method, "sparsity 0"]["score"] == pytest.approx(1, abs=1e-5)
        assert rows["recall", method, "sparsity 0"]["extra"]["output_error"] < 1e-9
        part = rows["recall", method, "sparsity 0.6"]
        assert 0.2 < part["selectivity"] < 0.6
        assert part["sparsity"] == pytest.approx(
            rows["perplexity", method, "sparsity 0.6"]["sparsity"], abs=1e-6
        )
    scores = {
        method: rows["recall", method, "sparsity 0.6"]["score"]
        for method in ("oracle", "sink_local")
    }
    assert scores["sink_local"] < scores["oracle"] < 1

    for routing in ("k-means", "oracle routing"):  # with all buckets equal to dense attention
        every = rows["recall", routing, f"{BUCKETS} probes"]
        assert every["score"] == pytest.approx(1, abs=1e-5)
        assert every["selectivity"] == pytest.approx(1)
        assert every["extra"]["layers"] == [1]
    one = {routing: rows["recall", routing, "1 probe"] for routing in ("k-means", "oracle routing")}
    assert rows["recall", str(WINDOW), "0 probes"]["score"] < one["oracle routing"]["score"] < 1
    assert one["k-means"]["score"] <= one["oracle routing"]["score"]
    assert rows["needle", "k-means", f"{BUCKETS} probes"]["selectivity"] == pytest.approx(1)
    window = rows["needle", str(WINDOW), "0 probes"]["selectivity"]
    # sink, recent, and decoded tokens that are in no bucket list yet
    assert 17 / 192 < window < 80 / 192
    assert all(
        row["latency_s"] > 0 and row["peak_memory_mb"] > 0
        for key, row in rows.items()
        if key[0] != "recall"
    )


def test_baselines_run_without_artifacts(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path, text, tasks=["perplexity"], baselines=["mean_pool"])
    results = json.loads((evaluate(cfg) / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["dense", "mean_pool", "mean_pool"]
    about = [note.split()[1] for note in results["notes"]]
    assert about == ["gate", "tokens:"], (
        "the task reads nothing else; blocks that are always read exceed a share"
    )
    shown = capsys.readouterr().out
    assert "msattn train-gate --model" in shown
    assert "mean pooling" in shown


def test_earlier_results_are_kept_by_failed_runs_and_unless_overwrite(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> set[str]:
        return {path.name for path in folder.parent.iterdir()}

    cfg = config(tmp_path, text, tasks=["perplexity"], baselines=[])
    folder = evaluate(cfg)
    before = (folder / "results.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("msattn.trainer.evaluate.report.files.page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(cfg)
    assert names() == {"eval", "eval.rows"}
    assert (folder / "results.json").read_bytes() == before
    evaluate(cfg)
    (kept,) = names() - {"eval"}
    assert (folder.with_name(kept) / "results.json").read_bytes() == before
    evaluate(replace(cfg, overwrite=True))
    assert names() == {"eval", kept}


def test_user_errors(trained: Path, text: str, tmp_path: Path) -> None:
    cfg = config(trained, text)
    own = cfg.eval
    long = replace(own, tasks=["perplexity"], perplexity=replace(own.perplexity, length=512))
    many = replace(
        own, tasks=["needle"], baselines=[], needle=replace(own.needle, probes=[BUCKETS + 1])
    )
    served = replace(
        own,
        tasks=["throughput"],
        baselines=[],
        throughput=ThroughputConfig(lengths=[250], tokens=7),
    )
    timed = replace(own, tasks=["latency"], baselines=[], latency=LatencyConfig(lengths=[512]))
    (tmp_path / "file").write_text("")
    for message, changes in {
        "512": {"eval": long},
        f"probes={BUCKETS + 1}": {"eval": many},
        r"length=257 of eval\.throughput": {"eval": served},
        r"length=512 of eval\.latency": {"eval": timed},
        "no such folder": {"artifacts": ArtifactsConfig(gate=str(tmp_path / "nowhere"))},
        "compare=nowhere: expected the folder of an earlier": {"compare": "nowhere"},
        "rand/base is not writable": {"outputs": str(tmp_path / "file")},
    }.items():
        with pytest.raises(UserError, match=message):
            evaluate(replace(cfg, **changes))
    other_weights = models.load(cfg.model, device="cpu", seed=1)
    notes = compared.find_compared(cfg, other_weights).on(other_weights).notes
    assert any("its weights_hash is" in note for note in notes)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_a_users_error() -> None:
    """For example fp16 that overflows."""
    run = PerplexityRun([float("nan")], [0.0], [1.0], seconds=[1.0], peak_mb=1.0, sparsity=0.5)
    with pytest.raises(
        UserError, match=r"gate sparsity 0\.5: the loss is nan; dtype=float32 may help"
    ):
        perplexity.as_row(
            "perplexity",
            MethodSetting("gate", Setting("sparsity", 0.5), nullcontext),
            run,
            run,
            1.0,
            64,
        )


@pytest.mark.slow
def test_evaluation_reads_only_held_out_documents(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 300)
    cfg = replace(
        config(tmp_path / "out", str(tmp_path)),
        data=DataConfig("text", path=str(tmp_path), seq_len=64),
    )
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
