"""The forms in which attach takes artifacts and selections, its defaults, and enable without a
context.
"""

import inspect
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import msattn
from msattn.trainer.artifacts import SHIPPED, find
from msattn.trainer.config.select import BASELINES
from msattn.trainer.methods.budgets import KeyShare
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.untrained import untrained_router
from msattn.trainer.models import EMBEDDED
from msattn.trainer.serving.attach import Sparse
from msattn.trainer.serving.build import AttachOptions
from tests.factory import random_partition, random_tokens, tiny_model


@pytest.fixture(scope="module")
def embedded() -> Any:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad(), msattn.attach(model, **options):
        return model(ids).logits


@torch.no_grad()
def test_the_shipped_artifacts_serve_the_embedded_model(embedded: Any) -> None:
    ids = random_tokens(1, 2000)
    with msattn.attach(embedded, gate="embedded", qmodel="embedded", dense_below=0) as sparse:
        embedded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
        )
        stats = sparse.stats()
    assert 0.2 < stats["sparsity"] < 0.95
    assert 0.15 < stats["selectivity"] < 0.9
    assert stats["dense_fallbacks"] == 0
    assert isinstance(msattn.load(SHIPPED / "kmeans"), KMeans)


def served(sparse: Sparse) -> tuple[int, int, int, frozenset[int]]:
    routed = sparse.dispatch.routed
    assert routed is not None
    return routed.budget.most, routed.recent, routed.sink, routed.layers


@pytest.mark.slow
def test_none_serves_as_the_artifacts_record(embedded: Any) -> None:
    with msattn.attach(embedded, qmodel="embedded") as sparse:
        assert served(sparse) == (2, 256, 1, {1, 2, 3, 4, 5})
    with msattn.attach(embedded, qmodel="embedded", probes=5, dense_layers=()) as sparse:
        assert served(sparse) == (5, 256, 1, {0, 1, 2, 3, 4, 5})
    with msattn.attach(embedded, qmodel="embedded", keys=0.02) as sparse:
        assert served(sparse) == (64, 256, 1, {1, 2, 3, 4, 5})  # at most all 64 buckets
        assert sparse.dispatch.routed is not None
        assert isinstance(sparse.dispatch.routed.budget, KeyShare)
        assert 1 < sparse.dispatch.routed.budget.density < 20
    ids = random_tokens(1, 700)
    calibrated = logits(embedded, ids, gate="embedded", select="calibrated")
    assert torch.equal(logits(embedded, ids, gate="embedded"), calibrated)
    assert not torch.equal(logits(embedded, ids, gate="embedded", select="topk"), calibrated)


@pytest.mark.parametrize("scores", [each for each in BASELINES if each != "a_shape"])
def test_a_baseline_is_named_by_its_scores(model: Any, scores: str) -> None:
    ids = random_tokens(1, 200)
    expected = logits(model, ids, select=msattn.SelectConfig(scores=scores, sparsity=0.5))
    assert torch.equal(logits(model, ids, select=scores, sparsity=0.5), expected)
    assert torch.equal(logits(model, ids, select={"scores": scores, "sparsity": 0.5}), expected)
    assert torch.equal(
        logits(model, ids, select=msattn.SelectConfig(scores=scores), sparsity=0.5), expected
    )


def test_a_router_without_training_is_named(embedded: Any, here: Path) -> None:
    """A str that is a name is no folder; the presets of large models serve it."""
    shutil.copytree(SHIPPED / "kmeans", here / "quest")
    for qmodel, kind in (
        ("quest", untrained_router("quest")),
        ("./quest", KMeans),
        (Path("quest"), KMeans),
    ):
        with msattn.attach(embedded, qmodel=qmodel) as sparse:
            assert sparse.dispatch.routed is not None
            assert isinstance(sparse.dispatch.routed.router, kind)
    with msattn.attach(embedded, qmodel="quest") as sparse:
        assert served(sparse) == (32, 2047, 1, {1, 2, 3, 4, 5})


def test_the_folder_of_a_run_holds_its_artifacts(embedded: Any, tmp_path: Path) -> None:
    run = tmp_path / "base"
    shutil.copytree(SHIPPED / "gate", run / "gate")
    assert find(run, "gate") == find(run / "gate", "gate") == run / "gate"
    message = "the folder holds gate; expected qmodel or decode_gate or kmeans"
    with pytest.raises(msattn.UserError, match=message), msattn.attach(embedded, qmodel=run):
        pass
    shutil.copytree(SHIPPED / "kmeans", run / "kmeans")
    with msattn.attach(embedded, gate=run, qmodel=str(run)) as sparse:
        assert sparse.dispatch.routed is not None
        assert isinstance(sparse.dispatch.routed.router, KMeans)
    shutil.copytree(SHIPPED / "qmodel", run / "qmodel")
    with msattn.attach(embedded, qmodel=run) as sparse:
        assert sparse.dispatch.routed is not None
        assert isinstance(sparse.dispatch.routed.router, QModel), "classifiers have precedence"
    with pytest.raises(
        msattn.UserError, match=r"the folder holds gate, kmeans, qmodel; name one, e.g. .*gate"
    ):
        msattn.load(run)


def test_enable_lasts_until_disable(model: Any) -> None:
    ids = random_tokens(1, 200)
    with torch.no_grad():
        dense = model(ids).logits
        sparse = msattn.enable(model, select="sink_local", sparsity=0.9)
        assert not torch.equal(model(ids).logits, dense)
        assert sparse.stats()["sparsity"] > 0
        with pytest.raises(msattn.UserError, match="already"):
            msattn.enable(model, select="quest")
        msattn.disable(model)
        assert torch.equal(model(ids).logits, dense)
    with pytest.raises(msattn.UserError, match="not enabled"):
        msattn.disable(model)
    with pytest.raises(TypeError, match="sparsty"):
        msattn.enable(model, select="quest", sparsty=0.5)  # pyrefly: ignore[unexpected-keyword]


def test_a_default_that_reads_every_bucket_is_announced(model: Any) -> None:
    router = random_partition(32)
    message = "probes=32 by default: every bucket is read"
    with pytest.warns(UserWarning, match=message), msattn.attach(model, qmodel=router):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with msattn.attach(model, qmodel=router, probes=32):
            pass


def test_what_would_turn_sparse_attention_off_is_refused(model: Any) -> None:
    ids = random_tokens(1, 40)
    with (
        pytest.raises(msattn.UserError, match="expected a causal language model"),
        msattn.attach("name", select="quest"),
    ):  # pyrefly: ignore[bad-argument-type]
        pass
    with msattn.attach(model, select="quest"):
        with pytest.raises(msattn.UserError, match="has no attention weights"):
            model(ids, output_attentions=True)
        model.set_attn_implementation("sdpa")
        with pytest.raises(msattn.UserError, match="turns sparse attention off"):
            model(ids)


@pytest.mark.slow
@torch.no_grad()
def test_autocast_and_compile(embedded: Any) -> None:
    ids = random_tokens(1, 200)
    expected = logits(embedded, ids, gate="embedded", qmodel="embedded")
    with msattn.attach(embedded, gate="embedded", qmodel="embedded") as sparse:
        compiled = torch.compile(embedded, backend="eager")
        torch.testing.assert_close(compiled(ids).logits, expected, rtol=1e-4, atol=1e-4)
        before = sparse.stats()["sparsity"]
        with torch.autocast("cpu", torch.bfloat16):
            embedded.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False
            )
        assert sparse.stats()["sparsity"] == pytest.approx(before, abs=0.05)


def test_every_option_is_in_the_signature_and_the_help() -> None:
    given = [x for x in inspect.signature(msattn.attach).parameters.values() if x.name != "model"]
    assert {x.name: x.default for x in given} == vars(AttachOptions())
    for x in given:
        assert re.search(rf"^    {x.name} : ", msattn.attach.__doc__ or "", re.M), x.name
