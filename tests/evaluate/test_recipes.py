"""Recipes of evaluations: documents of two corpora, the lab teacher with YaRN, and the table."""

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer

LENGTHS = [8192, 16384, 32768, 65536, 131072]


@pytest.mark.parametrize(
    ("recipe", "path", "split"),
    [
        ("documents_pg19", "emozilla/pg19", "test"),
        ("documents_proofpile", "emozilla/proofpile-test-tokenized-mistral", "train"),
    ],
)
def test_documents_of_a_corpus(recipe: str, path: str, split: str) -> None:
    cfg = compose("eval", [f"experiment={recipe}", "model.init=random"])
    assert (cfg.data.source, cfg.data.path, cfg.data.heldout_split) == ("hub", path, split)
    assert (cfg.eval.tasks, cfg.eval.documents.lengths) == (["documents"], LENGTHS)
    config, _ = config_and_tokenizer(cfg.model)
    assert max_length(config) == max(LENGTHS)


def test_the_teacher_has_twice_its_positions_with_yarn() -> None:
    cfg, trained = compose("eval", ["experiment=teacher_yarn"]), compose("eval", ["model=teacher"])
    assert (cfg.model.path, cfg.folder.name, cfg.data.seq_len) == (trained.model.path, "yarn", 65536)
    assert cfg.eval.perplexity.length == 65536
    assert cfg.eval.needle.lengths == cfg.eval.ruler.lengths == [65536]
    config, _ = config_and_tokenizer(compose("eval", ["experiment=teacher_yarn", "model.init=random"]).model)
    assert max_length(config) == 65536
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["rope_theta"] == 1e6, "that of the model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (["model=llama3"], [4096, 16384, 65536]),
        (["model=teacher"], [4096, 16384, 32768]),
        (["model=teacher", "data.seq_len=16384"], [4096, 16384]),
        (["model=tiny", "data.seq_len=1024"], [1024]),
    ],
)
def test_the_table_has_the_lengths_of_rulers_that_a_model_reads(overrides: list[str], lengths: list[int]) -> None:
    cfg = compose("eval", ["eval=table", *overrides])
    assert cfg.eval.ruler.lengths == lengths
    assert cfg.eval.key_shares == [0.02, 0.05, 0.1]
