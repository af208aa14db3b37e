"""SeerAttention's recipes: the settings of the paper."""

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
def test_gates_have_the_settings_of_the_paper(recipe: str, path: str, length: int) -> None:
    chosen = with_search_path([f"experiment={recipe}"], EXPERIMENTS)
    cfg = compose("train-gate", chosen)
    train, gate = cfg.train, cfg.gate
    assert (cfg.model.path, cfg.data.source, cfg.data.seq_len, cfg.dtype) == (
        path,
        "hub",
        length,
        "bfloat16",
    )
    assert (train.lr, train.schedule, train.steps, train.batch_size, train.weight_decay) == (
        1e-3,
        "cosine",
        500,
        16,
        0.0,
    )
    assert (gate.loss, gate.target, gate.q_pool, gate.k_pool, gate.block_size) == (
        "mse",
        "max",
        ["avg"],
        ["max", "min"],
        64,
    )
    assert cfg.data.num_chunks == train.steps * train.batch_size
    config, _ = config_and_tokenizer(compose("train-gate", [*chosen, "model.init=random"]).model)
    assert max_length(config) >= length
