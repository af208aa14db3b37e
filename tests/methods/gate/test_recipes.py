"""SeerAttention's recipes: their models, data and lengths fit."""

import pytest

from msattn.trainer.commands.compose import compose, with_search_path
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer
from tests.house.modules import EXPERIMENTS


@pytest.mark.parametrize(
    ("recipe", "path", "length"),
    [
        ("seer_llama31", "meta-llama/Llama-3.1-8B", 65536),
        ("seer_mistral7b", "mistralai/Mistral-7B-v0.3", 32768),
        ("seer_llama3_yarn_gates", "meta-llama/Meta-Llama-3-8B", 32768),
    ],
)
def test_the_model_has_positions_and_the_data_chunks_for_all_steps(
    recipe: str, path: str, length: int
) -> None:
    chosen = with_search_path([f"experiment={recipe}"], EXPERIMENTS)
    cfg = compose("train-gate", chosen)
    assert (cfg.model.path, cfg.data.seq_len) == (path, length)
    assert cfg.data.num_chunks == cfg.train.steps * cfg.train.batch_size
    config, _ = config_and_tokenizer(compose("train-gate", [*chosen, "model.init=random"]).model)
    assert max_length(config) >= length
