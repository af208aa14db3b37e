"""``attn_implementation="msattn"``: the first use enables a model with what its config.json names,
exactly as attach does.
"""

import gc
import shutil
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

import msattn
from msattn.trainer.artifacts import SHIPPED
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.serving.attend import Sparse
from tests.factory import random_tokens, tiny_config, tiny_model
from tests.running import succeed

SERVED = {"select": "topk", "sparsity": 0.8, "probes": 2, "recent": 16}
NO_NEW_WEIGHTS = {"pad_token_id": 0, "max_new_tokens": 4, "do_sample": False}


def logits(model: Any, ids: Tensor) -> Any:
    return model(ids).logits.tolist()


def generate(model: Any, ids: Tensor) -> Any:
    return model.generate(ids, **NO_NEW_WEIGHTS).tolist()


def generate_batch(model: Any, ids: Tensor) -> Any:
    config = Sparse.batching_config(num_blocks=8, max_batch_tokens=1024)
    answers = model.generate_batch(
        ids.tolist(),
        max_new_tokens=4,
        eos_token_id=-1,
        pad_token_id=0,
        do_sample=False,
        continuous_batching_config=config,
    )
    return [each.generated_tokens for each in answers.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its artifacts in one folder, configured."""
    folder = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(EMBEDDED_MODEL, folder)
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    settings = (f"{key}={value}" for key, value in SERVED.items())
    succeed("configure", str(folder), f"gate={folder}", f"qmodel={folder}", *settings)
    return folder


def loaded(folder: Path, implementation: str = "msattn") -> Any:
    msattn.register()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)


@pytest.mark.parametrize(
    "use",
    [generate, *(pytest.param(each, marks=pytest.mark.slow) for each in (logits, generate_batch))],
)
@torch.no_grad()
def test_the_first_use_is_that_of_attach(folder: Path, use: Callable[[Any, Tensor], Any]) -> None:
    ids = random_tokens(1, 600)
    # padding, and a token of the text that generate takes for padding unless the model is attached
    ids[0, [0, 400]] = 0
    model, dense = loaded(folder), loaded(folder, "sdpa")
    found = use(model, ids)
    with msattn.attach(dense, gate=folder, qmodel=folder, **SERVED) as sparse:
        assert found == use(dense, ids)
    own: Any = msattn.enabled(model)
    assert own.stats() == sparse.stats()
    assert own.stats()["sparsity"] > 0.3
    msattn.disable(model)
    assert msattn.enabled(model) is None
    assert not model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_without_settings_a_selection_without_training_serves_some_layers() -> None:
    msattn.register()
    config = tiny_config("gemma3_text")
    config.sparse_attention_config = {
        "config_groups": {"group_0": {"algorithm": "skip_softmax", "targets": ["Attention"]}}
    }
    model = AutoModelForCausalLM.from_config(config, attn_implementation="msattn").eval()
    ids = random_tokens(1, 240)
    dense = tiny_model("gemma3_text")
    dense.load_state_dict(model.state_dict())
    copied = deepcopy(model)
    with pytest.warns(
        ModelWarning,
        match="has no msattn settings: prompts use the training-free selection vertical_slash",
    ):
        found = model(ids).logits
    with msattn.attach(dense, select="vertical_slash"):
        assert torch.equal(found, dense(ids).logits)
    with pytest.warns(ModelWarning):
        assert torch.equal(copied(ids).logits, found)
    assert not copied._forward_pre_hooks, "its first use is over"


def test_an_enabled_model_is_freed(folder: Path) -> None:
    model = loaded(folder)
    generate(model, random_tokens(1, 20))
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None


def test_what_cannot_be_served_is_never_dense(folder: Path) -> None:
    model, ids = loaded(folder), random_tokens(1, 20)
    model.config.sparse_attention_config["config_groups"]["group_0"] |= {"probes": 65}
    for use in (logits, generate, logits):
        with pytest.raises(UserError, match="probes=65: expected 0 to"):
            use(model, ids)
    model.config.sparse_attention_config["config_groups"]["group_0"] |= {"probs": 2}
    with pytest.raises(UserError, match="sparse_attention_config=probs: expected gate, select, "):
        generate(model, ids)
    other = loaded(folder, "sdpa")
    other.set_attn_implementation("msattn")
    for each in (other, AutoModel.from_pretrained(folder, attn_implementation="msattn")):
        with pytest.raises(
            UserError,
            match="attn_implementation='msattn' is for from_pretrained and a model with its head",
        ):
            each(ids)
