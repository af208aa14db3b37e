"""``eval=documents``: perplexity of documents from their beginning."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from msattn.trainer import models
from msattn.trainer.config import DataConfig, DocumentsConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks.documents import beginnings
from tests.evaluate.runs import config, read_rows

SENTENCES = (
    "The mill stood by the river. Nobody had worked there for years, and the wheel was still. "
)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, repeats in enumerate((8, 3, 12)):
        (folder / f"{number}.txt").write_text(f"Document {number}. {SENTENCES * repeats}")
    return str(folder)


def test_rows_are_those_of_the_first_tokens(tmp_path: Path, texts: str) -> None:
    documents = DocumentsConfig(lengths=[64, 128], num_documents=5, sparsities=[0.0, 0.8])
    cfg = config(tmp_path, texts, tasks=["documents"], baselines=["random"], documents=documents)
    (tmp_path / "train.txt").write_text("Other words are what a model trains on.")
    object.__setattr__(
        cfg, "data", DataConfig(source="text", path=str(tmp_path / "train.txt"), heldout_path=texts)
    )
    folder = evaluate(cfg)
    rows = read_rows(folder, "length")
    loaded = models.load(cfg.model, device="cpu")
    for length in (64, 128):
        ids = [each[:length] for each in beginnings(cfg, loaded.tokenizer)]
        # the second document is too short for 128
        assert len(ids) == rows["dense", "", length]["samples"] == 2
        assert all(each[0] == loaded.tokenizer.bos_token_id for each in ids)
        assert str(loaded.tokenizer.decode(ids[1][1:])).startswith("Document 2. The mill")
        with torch.no_grad():
            logits = [loaded.model(each[None]).logits[0, :-1] for each in ids]  # pyrefly: ignore[not-callable]
        loss = torch.stack(
            [F.cross_entropy(one, each[1:]) for one, each in zip(logits, ids, strict=True)]
        ).mean()
        assert rows["dense", "", length]["score"] == pytest.approx(math.exp(loss.item()), rel=1e-4)
        assert rows["random", "sparsity 0", length]["ratio_to_dense"] == pytest.approx(1, abs=1e-5)
        assert rows["random", "sparsity 0.8", length]["ratio_to_dense"] != pytest.approx(
            1, abs=1e-5
        )
        dense, whole, sparse = (
            rows[each, setting, length]["extra"]
            for each, setting in (
                ("dense", ""),
                ("random", "sparsity 0"),
                ("random", "sparsity 0.8"),
            )
        )
        assert (dense["kl_divergence"], dense["same_top"]) == (0, 1)
        assert whole["kl_divergence"] == pytest.approx(0, abs=1e-6)
        assert whole["same_top"] == 1
        assert sparse["kl_divergence"] > 1e-5
        assert 0 <= sparse["kl_interval"][0] <= sparse["kl_divergence"] <= sparse["kl_interval"][1]
        assert (
            sparse["same_top_interval"][0]
            <= sparse["same_top"]
            <= sparse["same_top_interval"][1]
            <= 1
        )
    assert (folder / "documents.svg").exists()


def test_lengths_that_no_document_has(tmp_path: Path, texts: str) -> None:
    for documents, message in (
        (DocumentsConfig(lengths=[64, 256]), "lengths=256"),
        (DocumentsConfig(lengths=[64], min_tokens=200), "min_tokens=200"),
    ):
        cfg = config(tmp_path, f"{texts}/1.txt", tasks=["recall", "documents"], documents=documents)
        with pytest.raises(
            UserError, match=f"eval.documents.{message}: no held-out document has as many tokens"
        ):
            evaluate(cfg)
    with pytest.raises(
        UserError, match=r"eval\.documents\.min_tokens=63: expected null, or .* 64, or more"
    ):
        DocumentsConfig(lengths=[64], min_tokens=63)
