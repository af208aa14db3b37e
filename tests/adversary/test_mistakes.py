"""Mistakes on the command line: each is named in one line, and no artifact or text is changed."""

from pathlib import Path

import pytest
import torch

from msattn.trainer import models
from msattn.trainer.commands.compose import compose
from msattn.trainer.storage.hashes import folder_hashes
from tests.adversary.tries import Tries
from tests.running import SMALL, SMALL_EVAL

TRAINED = [*SMALL, "data.heldout_path=heldout.txt"]
NEW = [*TRAINED, "name=new"]
BY_KMEANS = [*NEW, "qmodel.long_range=8", "artifacts.kmeans=outputs/tiny/base/kmeans"]


REFUSED: list[tuple[list[str], str]] = [
    (
        ["train-gate", *NEW, "model.architecture.model_type=gpt2"],
        "model_type=gpt2: expected llama, mistral",
    ),
    (
        ["train-gate", *NEW, "model.architecture.num_attention_heads=3"],
        "not a multiple of the number of attention heads (3)",
    ),
    (
        ["train-gate", *NEW, "data.seq_len=8192"],
        "seq_len=8192: the model has positions for 4096 tokens",
    ),
    (["train-gate", *NEW, "data.path=latin1.txt"], "latin1.txt: not UTF-8 at byte 3"),
    (["train-gate", *TRAINED], "outputs/tiny/base/gate: an artifact already exists"),
    (["fit-kmeans", *NEW, "kmeans.num_buckets=100000"], "kmeans.num_buckets=100000"),
    (
        ["train-qmodel", *BY_KMEANS, "artifacts.kmeans=outputs/tiny/base/gate"],
        "kind=gate: expected kmeans",
    ),
    (["train-qmodel", *BY_KMEANS, "qmodel.long_range=500"], "qmodel.long_range=500"),
    (
        ["train-qmodel", *BY_KMEANS, "train.max_grad_norm=1"],
        "train.max_grad_norm=1.0: expected 0",
    ),
    (
        [
            "train-qmodel",
            *TRAINED,
            "qmodel.long_range=8",
            "overwrite=true",
            "resume=true",
            "qmodel.causal=true",
        ],
        "cache has data=[",
    ),
    (["eval", *SMALL_EVAL, "eval.recall.probes=[64]"], "probes=64: classifier has 4 buckets"),
    (
        ["eval", *SMALL_EVAL, "eval.tasks=[perplexity]", "select.block_size=32"],
        "select.block_size=32: the gate's blocks have 64",
    ),
    (
        ["eval", *SMALL_EVAL, "artifacts.gate=outputs/tiny/base/kmeans"],
        "kind=kmeans: expected gate",
    ),
    (["generate", *SMALL, "name=none", "--prompt", "a"], "no gate, k-means or classifier here"),
    (["generate", *SMALL, "--prompt", "word " * 4096], "positions for 4096 tokens"),
    (["generate", "--prompt", " "], "--prompt: empty"),
    (
        ["train-gate", *[x for x in NEW if not x.startswith("model.")], "model.path=./nan_weight"],
        "model.layers.1.self_attn.k_proj.weight has values that are not finite",
    ),
]


def kept(folder: Path) -> dict[str, str]:
    """Returns the hashes of artifacts and texts below a folder."""
    return {name: digest for name, digest in folder_hashes(folder).items() if "/runs/" not in name}


def test_mistakes(tries: Tries, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    Path("latin1.txt").write_bytes(b"caf\xe9 au lait " * 500)
    loaded = models.load(compose("train-gate", SMALL).model, device="cpu", dtype="float32")
    with torch.no_grad():
        loaded.model.get_parameter("model.layers.1.self_attn.k_proj.weight")[0, 0] = float("nan")
    loaded.model.save_pretrained("nan_weight")
    loaded.tokenizer.save_pretrained("nan_weight")
    before = kept(trained)
    for arguments, message in REFUSED:
        tries.command(arguments, *arguments, says=message)
        tries.record(arguments, None if kept(trained) == before else "files were changed")
