"""The methods that an evaluation compares: artifacts of the name, given and shipped ones,
baselines, and their settings.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from msattn.trainer import data, progress
from msattn.trainer.artifacts import KINDS, SHIPPED
from msattn.trainer.commands.compose import compose
from msattn.trainer.config import EvalRunConfig, SelectConfig
from msattn.trainer.evaluate import calibration, compared
from msattn.trainer.evaluate.compared import _artifact_paths, _block_selections, _bucket_routings
from msattn.trainer.evaluate.row import Setting
from msattn.trainer.evaluate.run import _print_estimate, evaluate
from msattn.trainer.evaluate.tasks import perplexity
from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import CALIBRATION_CHUNKS, calibrate_blocks
from msattn.trainer.methods.untrained.scores.quest import Quest
from msattn.trainer.models import timing
from msattn.trainer.models.loading import Loaded
from msattn.trainer.serving.attach import attach
from tests.evaluate.runs import config
from tests.sparse import gate_for, save


@pytest.mark.slow
def test_shipped_artifacts_replace_missing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths, notes = _artifact_paths(compose("eval"))
    shipped = ["gate", "kmeans", "qmodel"]  # no decode gates
    assert [tuple(each) for each in paths] == [(kind, SHIPPED / kind, "") for kind in shipped]
    assert [note.split(":")[0] for note in notes] == [
        f"There is no {kind} at outputs/tiny/base/{kind}" for kind in shipped
    ]
    for overrides in (["name=mine"], ["model.init=random"], ["model=llama3"]):
        paths, notes = _artifact_paths(compose("eval", overrides))
        assert paths == []
        assert len(notes) == 3
    own = Path("outputs/tiny/base/gate")
    shutil.copytree(SHIPPED / "gate", own)
    paths, notes = _artifact_paths(compose("eval"))
    assert [each.path for each in paths] == [own, SHIPPED / "kmeans", SHIPPED / "qmodel"]
    assert len(notes) == 2


def test_given_artifacts_are_compared_with_those_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("gate", "qmodel"):
        shutil.copytree(SHIPPED / kind, f"outputs/tiny/base/{kind}")
    paths, notes = _artifact_paths(compose("eval", ["eval=perplexity", "model=smollm2"]))
    assert (list(paths), [note.split()[1] for note in notes]) == ([], ["gate"]), (
        "only what the tasks read"
    )
    cfg = compose(
        "eval",
        ["artifacts.gate=embedded", "artifacts.qmodel=outputs/tiny/base", "eval.baselines=[quest]"],
    )
    paths, _ = _artifact_paths(cfg)
    assert [each[::2] for each in paths] == [
        ("gate", ""),
        ("gate", "embedded"),
        ("kmeans", ""),
        ("qmodel", ""),
    ], "the same folder is measured once"
    found = [(each, KINDS[each.kind].load(each.path)) for each in paths]
    names = [str(method.method) for method in _block_selections(cfg, found)]
    assert names == [
        "gate_question",
        "gate_question, top-k",
        "gate",
        "gate_question (embedded)",
        "quest",
    ]
    assert [str(method.method) for method in _bucket_routings(cfg, found)] == [
        "classifier",
        "k-means",
    ]


def test_baselines_are_calibrated_on_training_chunks(
    loaded: Loaded, trained: Path, text: str
) -> None:
    cfg = config(trained, text, baselines=["quest", "random"])
    cfg = replace(cfg, select=SelectConfig("calibrated", block_size=16))
    found = calibration.calibrate_selections(compared.find_compared(cfg, loaded), cfg, loaded)
    quest = next(method for method in found.block_selections if str(method.method) == "quest")
    train = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, num_chunks=CALIBRATION_CHUNKS)
    expected = calibrate_blocks(
        {"quest": Quest(16)}, loaded.model, [train[i] for i in range(len(train))]
    )["quest"]
    assert quest.thresholds == expected
    ((label, select),) = quest.settings([0.6])
    assert label == Setting("sparsity", 0.6)
    ids = train[0]["input_ids"]
    with quest.attach(loaded.model, select) as sparse:
        perplexity.prefill(loaded, ids)
        calibrated = sparse.stats()["sparsity"]
    by_hand = Selection.from_config(select, thresholds=expected)
    with attach(loaded.model, select=by_hand) as sparse:
        perplexity.prefill(loaded, ids)
        assert sparse.stats()["sparsity"] == calibrated
    topk = replace(cfg, select=SelectConfig("topk", block_size=16))
    assert all(
        method.thresholds is None
        for method in compared.find_compared(topk, loaded).block_selections
    )
    decoding = replace(cfg, eval=replace(cfg.eval, tasks=["decoding"]))
    untouched = compared.find_compared(cfg, loaded)
    assert calibration.calibrate_selections(untouched, decoding, loaded) is untouched


def test_the_time_of_an_evaluation_on_a_cpu(
    loaded: Loaded,
    trained: Path,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    cfg = config(trained, text, baselines=["quest"])
    cfg = replace(cfg, select=SelectConfig("calibrated", block_size=16))
    _print_estimate(cfg, loaded, compared.find_compared(cfg, loaded))
    duration = r"\d+:\d\d"
    tasks = ", ".join(f"{task} {duration}" for task in ("calibration", *cfg.eval.tasks))
    line = f"msattn: eval takes about {duration} in all: {tasks}\n"
    assert re.search(line, capsys.readouterr().err)
    cfg = replace(cfg, eval=replace(cfg.eval, tasks=["perplexity", "latency"]))
    _print_estimate(cfg, loaded, compared.find_compared(cfg, loaded))
    tasks = f"calibration {duration}, perplexity {duration}; not estimated: latency\n"
    assert re.search(f"eval takes at least {duration}: {tasks}", capsys.readouterr().err)


def test_the_time_of_perplexity_includes_that_of_all_predictions(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With a large vocabulary, as Gemma's, they take longer than the passes."""
    cfg = config(tmp_path, "unused", tasks=["perplexity"], baselines=["quest"])
    monkeypatch.setattr(timing, "seconds_of_pass", lambda model, tokens: float(tokens))
    monkeypatch.setattr(timing, "seconds_of_scores", lambda model: 10.0)
    _print_estimate(cfg, loaded, compared.find_compared(cfg, loaded))
    tokens, cases = 3 * 160, 3  # dense, and Quest at two sparsities
    seconds = tokens * (1 + 2 * (cases - 1)) + 10 * tokens * cases
    assert f"perplexity {progress.duration(seconds)}" in capsys.readouterr().err


def test_a_gate_without_fitting_thresholds_is_calibrated(
    loaded: Loaded, trained: Path, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Thresholds are measured once for a gate, a text and the blocks that are always read, and kept
    on disk.
    """
    cfg = config(trained, text, baselines=["quest"])
    text_of_chunks = replace(cfg.data, cache=str(tmp_path), seq_len=256)
    cfg = replace(
        cfg, data=text_of_chunks, select=SelectConfig("calibrated", scores="gate", block_size=16)
    )
    passes = []
    monkeypatch.setattr(
        calibration,
        "calibrate_blocks",
        lambda *given, **keys: passes.append(1) or calibrate_blocks(*given, **keys),
    )

    def calibrated(cfg: EvalRunConfig) -> dict[str, compared.ComparedSelection]:
        found = calibration.calibrate_selections(compared.find_compared(cfg, loaded), cfg, loaded)
        assert any(
            note.startswith("gate: its artifact has no thresholds for this selection")
            for note in found.notes
        )
        return {str(method.method): method for method in found.block_selections}

    first = calibrated(cfg)
    assert first["gate"].thresholds is not None
    assert len(passes) == 1
    again = calibrated(cfg)
    assert len(passes) == 1
    assert all(again[name].thresholds == first[name].thresholds for name in ("gate", "quest"))
    other = calibrated(replace(cfg, select=replace(cfg.select, sink_blocks=3)))
    assert len(passes) == 2
    ((_, select),) = other["gate"].settings([0.5])
    assert other["gate"].selection(select).always.sink_blocks == 3
    question = calibrated(replace(cfg, select=replace(cfg.select, scores="gate_question")))
    assert [*question] == ["gate_question", "gate_question, top-k", "gate", "quest"]
    assert question["gate_question"].thresholds is not None
    assert len(passes) == 3


def test_thresholds_are_measured_with_the_blocks_that_a_method_always_reads(
    loaded: Loaded, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate may record other blocks than the baselines read, as every imported gate does."""
    gate = gate_for(loaded.model)
    gate.always = AlwaysRead(0, 0)
    save(tmp_path / "rand" / "base", loaded, gate)
    cfg = config(tmp_path, text, baselines=["quest", "random"])
    cfg = replace(cfg, select=SelectConfig("calibrated", scores="gate", block_size=16))
    passes = []

    def measured(scorers: dict, *given: object, always: AlwaysRead) -> dict:
        passes.append(([*scorers], always))
        return calibrate_blocks(scorers, *given, always=always)

    monkeypatch.setattr(calibration, "calibrate_blocks", measured)
    found = calibration.calibrate_selections(compared.find_compared(cfg, loaded), cfg, loaded)
    assert passes == [(["gate"], AlwaysRead(0, 0)), (["quest", "random"], AlwaysRead(1, 1))]
    for method in found.block_selections:
        select = replace(method.select, sparsity=0.5)
        assert method.selection(select).always._replace(short_rows=0) == method.always


def test_multiscale_is_compared_with_topk_of_as_many_tokens(tmp_path: Path, text: str) -> None:
    select = SelectConfig(policy="multiscale", shares=[0.2, 0.1, 0.2, 0.4], block_size=16)
    evaluated = replace(
        config(tmp_path, text, tasks=["perplexity"], baselines=["oracle"]), select=select
    )
    (multiscale, zooms), (whole, topk) = compared.ComparedSelection(
        "oracle", replace(select, scores="oracle")
    ).settings([0.5])
    assert (str(multiscale), str(whole)) == ("shares 0.2 0.1 0.2 0.4", "sparsity 0.65")
    assert zooms == replace(select, scores="oracle")
    assert topk.policy == "topk"
    assert topk.sparsity == pytest.approx(0.65)
    results = json.loads((evaluate(evaluated) / "results.json").read_text())
    rows = [row for row in results["rows"] if row["method"] == "oracle"]
    assert [row["setting"] for row in rows] == [str(multiscale), str(whole)]
    # short rows round their shares
    assert rows[0]["sparsity"] == pytest.approx(rows[1]["sparsity"], abs=0.1)
    assert rows[0]["score"] != rows[1]["score"]


def test_policies_without_sparsity_have_one_setting() -> None:
    block = compared.ComparedSelection(
        "oracle", SelectConfig(policy="nucleus", mass=0.8, scores="oracle", block_size=16)
    )
    assert block.settings([0.5, 0.9]) == [(Setting("nucleus", 0.8), block.select)]
