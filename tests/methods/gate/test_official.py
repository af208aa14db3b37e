"""Import of SeerAttention's released gates: scores against their definition in plain PyTorch, and
refusals by name.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from msattn.trainer.artifacts import check_model
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.official import import_gate
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.serving.attach import attach
from tests.factory import inputs_of_layers, random_tokens, tiny_model
from tests.methods.gate.random_gates import BLOCK, rotated
from tests.methods.gate.released import SIZE, assert_refused, edited, pooled, released, their_rope
from tests.running import exit_code


def their_scores(
    q: Tensor,
    k: Tensor,
    key: Tensor,
    query: Tensor | None,
    pools: str,
    angles: Tensor,
    factor: float,
) -> Tensor:
    """Computes block probabilities ``[H, T, T]`` from ``q [H, N, D]`` and ``k [Hkv, N, D]`` by the
    definition, in fp64.
    """
    (q_pools, k_pools), blocks = pools.split("_"), math.ceil(q.shape[1] / BLOCK)
    logits = torch.full((len(q), blocks, blocks), -torch.inf, dtype=torch.float64)
    for head in range(len(q)):
        of_group = head * len(k) // len(q)
        weight = key[head if len(key) == len(q) else of_group].double()
        for row, queries in enumerate(q[head].double().split(BLOCK)):
            vector = pooled(queries, q_pools)
            vector = factor * rotated(
                vector if query is None else vector @ query[head].double(), angles, row * BLOCK
            )
            for column, keys in enumerate(k[of_group].double().split(BLOCK)[: row + 1]):
                other = factor * rotated(pooled(keys, k_pools) @ weight, angles, column * BLOCK)
                logits[head, row, column] = vector @ other / math.sqrt(key.shape[2])
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("family", "rope", "hidden", "pools", "keys"),
    [
        ("llama", "llama3", SIZE, "Qavg_Kmaxminavg", {}),  # as released
        ("llama", "yarn", SIZE, "Qavg_Kmaxmin", {}),
        ("llama", "default", SIZE, "Qavg_Kavg", {"seerattn_gate_force_double": True}),
        ("llama", "linear", SIZE, "Qmaxavg_Kmin", {}),
        ("qwen2", "default", SIZE, "Qavg_Kmaxminavg", {}),
        ("qwen2", "yarn", 8, "Qmin_Kmaxavg", {}),
    ],
)
def test_scores_are_theirs(
    tmp_path: Path, family: str, rope: str, hidden: int, pools: str, keys: dict[str, Any]
) -> None:
    weights = released(tmp_path / "theirs", family, rope, hidden, pools, **keys)
    import_gate(str(tmp_path / "theirs"), tmp_path / "gate")
    gate = Gate.load(tmp_path / "gate")
    for x in inputs_of_layers(tiny_model(family, rope), random_tokens(1, 5 * BLOCK + 7)):
        name = f"model.layers.{x.layer}.self_attn.attn_gate"
        key = weights[f"{name}.mask_linear_k.weight"]
        query = weights.get(f"{name}.mask_linear_q.weight")
        expected = their_scores(
            x.q_nope[0], x.k_nope[0], key, query, pools, *their_rope(family, rope, hidden)
        )
        torch.testing.assert_close(gate.scores(x)[0].double(), expected, rtol=1e-4, atol=1e-6)
        assert (expected[:, -1].amax(-1) - expected[:, -1].amin(-1)).min() > 0.01, (
            "gates that tell blocks apart"
        )


@pytest.mark.filterwarnings("ignore::msattn.trainer.errors.ModelWarning")
def test_the_artifact_serves_the_base_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from safetensors, on the command line."""
    tensors = released(tmp_path / "theirs")
    (tmp_path / "theirs" / "attn_gate_weights.pth").unlink()
    save_file(tensors, tmp_path / "theirs" / "attn_gate_weights.safetensors")
    call = ["import-gate", str(tmp_path / "theirs"), "--out", str(tmp_path / "gate")]
    for arguments, code in ((call, 0), (call, 2), ([*call, "--overwrite"], 0)):
        assert exit_code(*arguments) == code
    out, err = capsys.readouterr()
    assert "gates of 2 layers and 4 heads, blocks of 16 tokens, poolings avg and max+min+avg" in out
    assert "overwrite" in err
    model = tiny_model()
    gate = Gate.load(tmp_path / "gate")
    assert gate.artifact is not None
    manifest = gate.artifact.manifest
    assert manifest["model"]["id"] == "someone/base"
    assert str(tmp_path) not in (tmp_path / "gate" / "config.yaml").read_text() + json.dumps(
        manifest
    )
    assert "does not identify that model" in (
        check_model(manifest, fingerprint(model), strict=False) or ""
    )
    with pytest.raises(UserError, match="does not identify that model"):
        check_model(manifest, fingerprint(model))
    with attach(model, gate=gate, select="topk", sparsity=0.8, dense_below=0) as sparse:
        model(random_tokens(1, 160))
    # as in the paper, only a row's own block is always read
    read = sum(max(1, round(0.2 * row)) for row in range(1, 11))
    assert sparse.stats()["sparsity"] > 1 - read / 55 - 0.1  # the last row may read more
    with attach(
        model, gate=gate, select={"sink_blocks": 1, "local_blocks": 1}, sparsity=0.8, dense_below=0
    ) as more:
        model(random_tokens(1, 160))
    assert more.stats()["sparsity"] < sparse.stats()["sparsity"] - 0.1


class Code:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "attn_gate_weights.pth"
    torch.save(change(torch.load(path, weights_only=True)), path)


FIRST = "model.layers.0.self_attn.attn_gate.mask_linear_k.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "config.json").unlink(), "no config.json"),
        (lambda at: (at / "attn_gate_weights.pth").unlink(), "there are no gates"),
        (lambda at: edited(at, model_type="qwen3"), "model_type=qwen3: expected llama, qwen2"),
        (lambda at: edited(at, seerattn_gate_type=None), "no key seerattn_gate_type"),
        (
            lambda at: edited(at, seerattn_gate_type=None, seerattn_q_head_pooling_type="Qproj"),
            "expected qwen2, qwen3",
        ),
        (
            lambda at: edited(at, seerattn_gate_type="Qavgavg_Kavg"),
            "the gates differ from ours: gate.q_pool",
        ),
        (
            lambda at: edited(at, seerattn_gate_block_size=48),
            "the gates differ from ours: gate.block_size=48",
        ),
        (
            lambda at: edited(at, seerattn_gate_hidden_size=8),
            "its RoPE is that of heads of size 16",
        ),
        (
            lambda at: edited(
                at, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type=dynamic",
        ),
        (
            lambda at: edited(at, num_hidden_layers=3),
            "has no model.layers.2.self_attn.attn_gate.mask_linear_k.weight",
        ),
        (lambda at: edited(at, seerattn_gate_force_double=True), "mask_linear_q.weight"),
        (
            lambda at: rewritten(at, lambda t: t | {FIRST: t[FIRST][:, 1:]}),
            "has the shape [4, 47, 16], by config.json it is",
        ),
        (lambda at: rewritten(at, lambda t: t | {FIRST: t[FIRST] / 0}), "not finite"),
        (lambda at: rewritten(at, lambda t: t | {FIRST: Code()}), "does not contain only weights"),
        (
            lambda at: (at / "attn_gate_weights.pth").write_bytes(b"junk"),
            "does not contain only weights",
        ),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], message: str
) -> None:
    released(tmp_path / "theirs")
    damage(tmp_path / "theirs")
    assert_refused(tmp_path, monkeypatch, message)


def test_a_source_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; expected a folder or the id"):
        import_gate(str(tmp_path / "nowhere"), tmp_path / "gate")
