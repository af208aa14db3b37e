"""Import of SeerAttention-R's released gates: scores against their definition in plain PyTorch, and
refusals by name.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.gate.official import import_gate
from msattn.trainer.models import rope
from msattn.trainer.models.layer_attention import Pooled
from msattn.trainer.serving.attach import attach
from tests.factory import inputs_of_layers, random_tokens, tiny_model
from tests.methods.gate.random_gates import BLOCK, rotated
from tests.methods.gate.released import (
    KV_HEADS,
    SIZE,
    assert_refused,
    edited,
    pooled,
    their_rope,
    write,
)
from tests.methods.gate.released import released as released_for_prefill
from tests.running import succeed

GROUP = 2
NORMS = {"seerattn_use_qk_norm": True}  # as in the script that trains them


def released(
    folder: Path,
    family: str = "qwen3",
    rope: str = "default",
    hidden: int = SIZE,
    queries: str = "Qproj",
    keys: str = "Kmaxminavg",
    **others: Any,
) -> dict[str, Tensor]:
    """Writes a folder of the layout of gates for decoding with random weights, and returns them."""
    of_queries = {
        "Qproj": (KV_HEADS, GROUP, SIZE, hidden),
        "Qavgproj": (KV_HEADS, SIZE, hidden),
        "Qavg": None,
    }[queries]
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.attn_gate.attngate"
        tensors[f"{name}_linear_k.weight"] = (
            torch.randn(KV_HEADS, len(keys) // 3 * SIZE, hidden) / 4
        )
        if of_queries:
            tensors[f"{name}_linear_q.weight"] = torch.randn(of_queries) / 4
        if others.get("seerattn_use_qk_norm"):
            tensors |= {f"{name}_{part}norm.weight": 1 + torch.randn(hidden) / 4 for part in "qk"}
    own = {
        "seerattn_q_head_pooling_type": queries,
        "seerattn_k_seq_pooling_type": keys,
        "seerattn_loss_slice_ratio": 0.5,
    }
    return write(folder, family, rope, hidden, own | others, tensors)


def their_scores(
    q: Tensor,
    k: Tensor,
    weights: dict[str, Tensor],
    pools: str,
    angles: Tensor,
    factor: float,
    averaged: bool,
) -> Tensor:
    """Computes block scores ``[Hkv, T]`` of the last of ``q [H, N, D]`` for ``k [Hkv, N, D]`` by
    the definition, in fp64.

    ``averaged`` queries of a group are their mean.
    """
    query, key, scores = weights.get("linear_q"), weights["linear_k"].double(), []

    def finished(vector: Tensor, norm: str, position: int) -> Tensor:
        if norm in weights:
            vector = vector / (vector.square().mean() + 1e-6).sqrt() * weights[norm].double()
        return factor * rotated(vector, angles, position)

    for head in range(len(k)):
        group = q[head * GROUP : (head + 1) * GROUP, -1].double()
        if averaged:
            vector = group.mean(0) if query is None else group.mean(0) @ query[head].double()
        else:
            assert query is not None
            vector = sum(
                (group[i] @ query[head, i].double() for i in range(GROUP)), torch.zeros(())
            )
        vector = finished(vector, "qnorm", q.shape[1] - 1)
        for number, block in enumerate(k[head].double().split(BLOCK)):
            other = finished(pooled(block, pools) @ key[head], "knorm", number * BLOCK)
            scores.append(vector @ other / math.sqrt(len(vector)))
    return torch.stack(scores).view(len(k), -1)


@pytest.mark.parametrize(
    ("family", "rope", "hidden", "queries", "keys", "others"),
    [
        ("qwen3", "default", SIZE, "Qproj", "Kmaxminavg", NORMS),
        ("qwen3", "yarn", SIZE, "Qproj", "Kmaxminavg", NORMS),
        ("qwen3", "yarn", SIZE, "Qproj", "Kavg", {}),
        ("qwen3", "default", SIZE, "Qavg", "Kmaxmin", {}),
        ("qwen3", "default", 8, "Qavgproj", "Kminavg", {"seerattn_use_rope": False}),
        ("qwen3", "yarn", SIZE, "Qproj", "Kmax", {"seerattn_use_rope": False, **NORMS}),
        ("qwen2", "linear", 8, "Qavgproj", "Kmaxavg", NORMS),
        ("qwen2", "yarn", SIZE, "Qavg", "Kmaxminavg", NORMS),
    ],
)
def test_scores_are_theirs(
    tmp_path: Path,
    family: str,
    rope: str,
    hidden: int,
    queries: str,
    keys: str,
    others: dict[str, Any],
) -> None:
    weights = released(tmp_path / "theirs", family, rope, hidden, queries, keys, **others)
    import_gate(str(tmp_path / "theirs"), tmp_path / "decode_gate")
    gate = DecodeGate.load(tmp_path)
    of_gate = their_rope(family, rope if others.get("seerattn_use_rope", True) else "none", hidden)
    for x in inputs_of_layers(tiny_model(family, rope), random_tokens(1, 7 * BLOCK + 5)):
        prefix = f"model.layers.{x.layer}.self_attn.attn_gate.attngate_"
        layer = {
            name.removeprefix(prefix)[:-7]: weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        expected = their_scores(x.q_nope[0], x.k_nope[0], layer, keys, *of_gate, "avg" in queries)
        last = torch.tensor([x.num_keys - 1])
        for found in (
            gate.logits(x, last)[0, :, 0],
            gate.scores(x.layer, gate.summarize(x), x.q_nope[:, :, last], x.q[:, :, last], last)[0],
        ):
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        assert expected.std(-1).min() > 0.01, "gates that tell blocks apart"


@pytest.mark.filterwarnings("ignore::msattn.trainer.errors.ModelWarning")
def test_the_artifact_serves_the_base_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released(
        tmp_path / "theirs", seerattn_token_budget=3 * BLOCK + 5, seerattn_start_layer=1, **NORMS
    )
    succeed("import-gate", str(tmp_path / "theirs"), "--out", str(tmp_path / "decode_gate"))
    out = capsys.readouterr().out
    assert (
        "decode gates of 2 layers and 2 key/value heads, blocks of 16 tokens, pooling max+min+avg"
        in out
    )
    gate = DecodeGate.load(tmp_path)
    assert gate.artifact is not None
    assert gate.artifact.manifest["model"]["id"] == "someone/base"
    assert gate.decode_numbers({}) == {
        "probes": 3,
        "recent": BLOCK,
        "sink": 0,
        "dense_layers": (0,),
    }
    model, ids = tiny_model("qwen3"), random_tokens(1, 200)
    with attach(model, qmodel=tmp_path, dense_below=0) as sparse:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert 3 * BLOCK / 203 < sparse.stats()["selectivity"] < 5 * BLOCK / 200


@pytest.mark.filterwarnings("ignore::msattn.trainer.errors.ModelWarning")
def test_blocks_that_new_tokens_finish_are_rotated_at_their_last_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released(tmp_path / "theirs", **NORMS)
    gates = {}
    for at, option in (("last", ()), ("first", ("--finished-at", "first"))):
        succeed(
            "import-gate",
            str(tmp_path / "theirs"),
            "--out",
            str(tmp_path / at / "decode_gate"),
            *option,
        )
        gates[at] = DecodeGate.load(tmp_path / at)
    model, prompt = tiny_model("qwen3"), 3 * BLOCK + 4  # the prompt ends in the fourth block
    for x in inputs_of_layers(model, random_tokens(1, 6 * BLOCK)):
        keys = pool_blocks(x.k_nope, gates["last"].cfg.k_pool, block_size=BLOCK)
        cached = Pooled(keys, x.num_keys, prompt)
        last, first = (gates[at].summarize(replace(x, pooled=cached)) for at in ("last", "first"))
        torch.testing.assert_close(first, gates["last"].summarize(x))
        torch.testing.assert_close(last[:, :, :3], first[:, :, :3])
        # the product of two rotated vectors depends on the distance of their positions
        for block in range(3, 6):
            later = rope.rotate(
                first[:, :, block : block + 1],
                *rope.cos_sin(gates["last"].inv_freq, torch.tensor([[BLOCK - 1]])),
            )
            torch.testing.assert_close(last[:, :, block : block + 1], later, rtol=1e-4, atol=1e-5)
    found = []
    summarize = DecodeGate.summarize
    monkeypatch.setattr(
        DecodeGate,
        "summarize",
        lambda gate, x: found.append((x.pooled.prompt_keys, x.num_keys)) or summarize(gate, x),
    )
    with attach(model, qmodel=gates["last"], dense_below=0, recent=8, dense_layers=(0,)):
        model.generate(random_tokens(1, prompt), max_new_tokens=80, do_sample=False)  # pyrefly: ignore[not-callable]
    assert {keys for keys, _ in found} == {prompt}
    assert max(keys for _, keys in found) > prompt, "the index was built again"


def test_gates_for_prefill_have_no_finished_blocks(tmp_path: Path) -> None:
    released_for_prefill(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"^--finished-at last: these are gates for prefill"):
        import_gate(str(tmp_path / "theirs"), tmp_path / "gate", finished_at="last")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: edited(at, model_type="llama"), "model_type=llama: expected qwen2, qwen3"),
        (lambda at: edited(at, base_model=None), "no key base_model"),
        (
            lambda at: edited(at, seerattn_q_head_pooling_type="Qorig"),
            "seerattn_q_head_pooling_type=Qorig: expected Qproj",
        ),
        (
            lambda at: edited(at, seerattn_k_seq_pooling_type="Kmed"),
            "seerattn_k_seq_pooling_type=Kmed: expected poolings",
        ),
        (
            lambda at: edited(at, seerattn_k_seq_pooling_type="Kavgavg"),
            "the gates differ from ours: gate.k_pool",
        ),
        (
            lambda at: edited(at, seerattn_gate_hidden_size=8, seerattn_q_head_pooling_type="Qavg"),
            "seerattn_gate_hidden_size=8: with Qavg it is the head size, 16",
        ),
        (
            lambda at: edited(at, seerattn_use_qk_norm=False),
            "does not ask for, model.layers.0.self_attn.attn_gate.attngate_knorm",
        ),
        (lambda at: edited(at, seerattn_use_qk_norm=1), "seerattn_use_qk_norm=1"),
        (
            lambda at: edited(at, seerattn_q_head_pooling_type="Qavgproj"),
            "by config.json it is [2, 16, 16]",
        ),
        (lambda at: edited(at, seerattn_token_budget=0), "seerattn_token_budget=0"),
        (
            lambda at: edited(at, seerattn_start_layer=2),
            "seerattn_start_layer=2: the model has 2 layers",
        ),
        (
            lambda at: edited(
                at,
                layer_types=["full_attention", "sliding_attention"],
                use_sliding_window=True,
                sliding_window=8,
            ),
            "full attention",
        ),
        (
            lambda at: edited(at, num_hidden_layers=3, layer_types=None),
            "has no model.layers.2.self_attn.attn_gate.attngate_",
        ),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], message: str
) -> None:
    released(tmp_path / "theirs", **NORMS)
    damage(tmp_path / "theirs")
    assert_refused(tmp_path, monkeypatch, message)
