"""Decode gates: scores and targets against plain fp64 computations, training, calibrated
thresholds, artifact.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import msattn
from msattn.kernels.common.densities import bucket_densities
from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.gate import decode_distillation
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_distillation import (
    DecodeGateDistiller,
    decode_gate_recall,
    far_blocks,
    largest_in_blocks,
    mass_of_blocks,
    sample_queries,
)
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.key_thresholds import calibrate_keys
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from msattn.trainer.serving.build import ROUTER, load_router
from tests.factory import inputs_of_layers, random_tokens, tiny_config, tiny_model
from tests.methods.gate.random_gates import (
    BLOCK,
    FUNCTIONS,
    decode_config,
    random_decode_gate,
    rotated,
)
from tests.sparse import save


def normalized(y: Tensor, weight: Tensor) -> Tensor:
    return y / (y.square().mean() + 1e-6).sqrt() * weight


def scores_in_loops(gate: DecodeGate, x: LayerInputs, query: int, position: int) -> Tensor:
    """Scores ``[Hkv, Tc]`` before softmax of one unpadded sequence by the definition, in loops over
    blocks and heads.
    """
    weights: Any = gate.gates[x.layer]
    group, cfg, found = x.q_nope.shape[1] // gate.kv_heads, gate.cfg, []
    for h in range(gate.kv_heads):
        y = weights.query_weight[h] @ torch.cat(
            [x.q_nope[0, h * group + i, query] for i in range(group)]
        )
        y = normalized(y, weights.query_norm[h]) if cfg.qk_norm else y
        gate_q = rotated(y, gate.inv_freq, position) if cfg.rope else y
        for c, block in enumerate(x.k_nope[0, h].split(BLOCK)):
            y = weights.key_weight[h] @ torch.cat([FUNCTIONS[pool](block) for pool in cfg.k_pool])
            y = normalized(y, weights.key_norm[h]) if cfg.qk_norm else y
            gate_k = rotated(y, gate.inv_freq, c * BLOCK) if cfg.rope else y
            found.append(gate_q @ gate_k / len(gate_q) ** 0.5)
    return torch.stack(found).unflatten(0, (gate.kv_heads, -1))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(
    q: Tensor, k: Tensor, start: Tensor | None = None, q_nope: Tensor | None = None
) -> LayerInputs:
    """Inputs of layer 1, in which queries before RoPE are ``q_nope`` and keys before RoPE the
    negative keys.
    """
    return LayerInputs(
        1, q, k, k, q if q_nope is None else q_nope, -k, Angles(q, q), Scoring(0.25), start
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (4, 2)])
@pytest.mark.parametrize(
    "changes", [{}, {"hidden": 8}, {"qk_norm": True}, {"rope": False, "k_pool": ["avg"]}], ids=str
)
def test_scores_equal_plain_loops_in_fp64(
    heads: int, kv_heads: int, changes: dict[str, Any]
) -> None:
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": 16 * heads,
    }
    gate = random_decode_gate(decode_config(**changes), **sizes).double()
    for length in (1, BLOCK, 71):
        q, k = normal(1, heads, length, 16), normal(1, kv_heads, length, 16, seed=1)
        x, positions = inputs(q, k), torch.tensor([0, length // 2, length - 1])
        logits = gate.logits(x, positions)
        rows = q[0, :, positions].transpose(0, 1)[:, :, None]  # [n, Hq, 1, D]
        singly = gate.scores(1, gate.summarize(x), rows, rows, positions)
        by_head = gate.head_scores(1, gate.summarize(x), rows, rows, positions)
        for row, position in enumerate(positions.tolist()):
            expected = scores_in_loops(gate, x, position, position)
            torch.testing.assert_close(logits[0, :, row], expected)
            torch.testing.assert_close(singly[row], expected)
            torch.testing.assert_close(
                by_head[row], expected.repeat_interleave(heads // kv_heads, 0)
            )


def test_padding_does_not_change_scores() -> None:
    gate, lengths = random_decode_gate().double(), (70, 33)
    k, q = normal(2, 2, 70, 16), normal(2, 4, 1, 16, seed=1)
    start = torch.tensor([70 - each for each in lengths], dtype=torch.int32)
    x = inputs(q, k, start)
    scores = gate.far_scores(x, gate.summarize(x), window=5)
    for row, length in enumerate(lengths):
        alone = inputs(q[row : row + 1], k[row : row + 1, :, 70 - length :])
        expected = scores_in_loops(gate, alone, 0, length - 1)
        far = -(-(length - 5) // BLOCK)  # blocks with a key before the window
        torch.testing.assert_close(scores[row, :, :far], expected[:, :far])
        assert (scores[row, :, far:] == -torch.inf).all()
        probabilities = gate.probabilities(scores)[row]
        torch.testing.assert_close(probabilities[:, :far], expected[:, :far].softmax(-1))
        assert (probabilities[:, far:] == 0).all()


def test_rows_without_a_far_block_read_none() -> None:
    gate = random_decode_gate()
    scores = gate.only_far(torch.zeros(2, 1, 3), torch.tensor([0, 20]))
    probabilities = gate.probabilities(scores)
    assert probabilities.tolist() == [[[0, 0, 0]], [[0.5, 0.5, 0]]]
    densities = bucket_densities(probabilities, torch.full((2, 1, 3), BLOCK))
    assert densities.tolist() == [[[0, 0, 0]], [[1.5, 1.5, 0]]]
    assert gate.best(scores, 2).tolist() == [[[-1, -1]], [[0, 1]]]
    assert gate.best(scores, 0).shape == (2, 1, 0)
    assert gate.best(scores, 9).shape == (2, 1, 3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1)])
@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (1, 0), (3, 20)])
def test_targets_are_the_largest_of_the_full_softmax(
    heads: int, kv_heads: int, sink: int, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three queries at a time
    monkeypatch.setattr(decode_distillation, "SCORES_AT_ONCE", 2 * heads * 75 * 3)
    q, k = 3 * normal(2, heads, 75, 16), normal(2, kv_heads, 75, 16, seed=1)
    x, positions = inputs(q, k), torch.tensor([0, 15, 16, 30, 31, 62, 74])
    largest = largest_in_blocks(x, positions, BLOCK, sink=sink, recent=recent)
    mass, visible = mass_of_blocks(x, positions, BLOCK), far_blocks(positions, 75, BLOCK, recent)
    assert largest.shape == (2, kv_heads, 7, 5)
    scores = (q @ k.repeat_interleave(heads // kv_heads, 1).mT * 0.25).masked_fill(
        torch.ones(75, 75).triu(1).bool(), -torch.inf
    )
    everything = scores.softmax(-1)
    for row, position in enumerate(positions.tolist()):
        for block in range(5):
            keys = range(block * BLOCK, min(75, (block + 1) * BLOCK))
            torch.testing.assert_close(
                mass[:, :, row, block], everything[:, :, position, keys.start : keys.stop].sum(-1)
            )
            counted = [key for key in keys if key >= sink and key <= position - recent]
            assert bool(visible[0, 0, row, block]) == (keys.start <= position - recent)
            if not counted:
                assert (largest[:, :, row, block] == 0).all()
                continue
            expected = (
                everything[:, :, position, counted].amax(-1).unflatten(1, (kv_heads, -1)).amax(2)
            )
            torch.testing.assert_close(largest[:, :, row, block], expected)


@pytest.mark.parametrize(
    ("changes", "first"), [({}, 11), ({"qk_norm": True, "skip_rows": 2}, 2 * BLOCK)], ids=str
)
def test_gradients_are_those_of_one_autograd_graph(changes: dict[str, Any], first: int) -> None:
    model, ids = tiny_model(), random_tokens(1, 100)
    gate = DecodeGate.build(model.config, decode_config(queries=20, recent=10, **changes))
    outputs = DecodeGateDistiller(gate, model)(ids)
    torch.testing.assert_close(
        torch.stack([outputs["parts"][f"layer {i}"] for i in range(2)]).sum(), outputs["loss"]
    )
    outputs["loss"].backward()
    assert all(weight.grad is None for weight in model.parameters())
    found = [weight.grad for weight in gate.parameters()]
    gate.zero_grad()  # sets the gradients to None
    loss = torch.zeros(())
    for x in inputs_of_layers(model, ids):
        positions = sample_queries(ids, 20, first)
        target = largest_in_blocks(x, positions, BLOCK, sink=1, recent=10)
        target = target / target.sum(-1, keepdim=True)
        far = far_blocks(positions, 100, BLOCK, 10)
        log_gate = gate.logits(x, positions).masked_fill(~far, -1e30).log_softmax(-1)
        loss = loss + (torch.xlogy(target, target) - target * log_gate).sum(-1).mean()
    loss.backward()
    for mine, weight in zip(found, gate.parameters(), strict=True):
        torch.testing.assert_close(mine, weight.grad, rtol=1e-4, atol=1e-6)


def test_the_mean_share_of_the_keys_is_the_calibrated_one() -> None:
    """The keys are counted block by block for every query, which needs none of the calibration's
    code.
    """
    model, ids, recent, sink = tiny_model(), random_tokens(3, 250), 20, 1
    gate = random_decode_gate()
    table = calibrate_keys(
        gate, model, [{"input_ids": row} for row in ids], recent=recent, sink=sink, dense_layers=[0]
    )
    threshold = table.density(0.2)
    read, total, counts = 0, 0, set()
    for row in ids:
        x = inputs_of_layers(model, row[None])[1]
        logits = gate.logits(x, torch.arange(250))[0]
        for at in range(recent, 250):
            last = at - recent  # last far key
            probabilities = logits[:, at, : last // BLOCK + 1].softmax(-1)
            for head in range(2):
                dense = probabilities[head] / BLOCK * (at + 1) >= threshold
                keys = sum(
                    min(last + 1, (c + 1) * BLOCK) - max(sink, c * BLOCK)
                    for c in dense.nonzero()[:, 0].tolist()
                )
                read, total = read + keys, total + last + 1 - sink
                counts.add(keys)
    assert read / total == pytest.approx(0.2, rel=0.05)
    assert len(counts) > 10


def test_an_artifact_is_loaded(tmp_path: Path) -> None:
    gate = random_decode_gate(decode_config(hidden=8, k_pool=["max", "min", "avg"]))
    gate.thresholds = KeyThresholds([0.1, 0.5], [2.0, 1.0])
    folder = save(
        tmp_path,
        tiny_model(),
        gate,
        serving={"probes": 3, "recent": 9, "sink": 2, "dense_layers": [1]},
    )
    for loaded in (
        msattn.load(folder),
        DecodeGate.load(tmp_path),
        load_router(tmp_path, tiny_config()),
    ):
        assert isinstance(loaded, DecodeGate)
        assert loaded.artifact is not None
        assert (loaded.cfg, loaded.thresholds, loaded.num_buckets) == (
            gate.cfg,
            gate.thresholds,
            16,
        )
        assert loaded.model_shape() == gate.model_shape()
        assert not any(weight.requires_grad for weight in loaded.parameters())
        for name, tensor in gate.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name])
    assert DecodeGate.load(folder).decode_numbers({}) == {
        "probes": 3,
        "recent": 9,
        "sink": 2,
        "dense_layers": (1,),
    }
    assert "SeerAttention decode gates" in (folder / "README.md").read_text()
    assert 'qmodel="path/or/hub-id"' in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"num_blocks": 0}, "details: num_blocks=0"),
        ({"num_blocks": "16"}, "details: num_blocks='16'"),
        ({"gate": None}, "details: gate=None"),
        ({"thresholds": {"shares": [0.1], "densities": []}}, "densities must be 1 numbers"),
        ({"serving": {"probes": -1}}, "details: serving.probes=-1"),
        ({"serving": {"recent": 1.5}}, "details: serving.recent=1.5"),
    ],
    ids=str,
)
def test_damaged_details_are_refused(tmp_path: Path, damage: dict[str, Any], says: str) -> None:
    gate, plain = random_decode_gate(), random_decode_gate().details()
    gate.details = lambda: plain | damage  # type: ignore[method-assign]
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        DecodeGate.load(save(tmp_path, tiny_model(), gate, serving=damage.get("serving", {})))
    assert "\n" not in str(refused.value)


def test_gates_of_the_other_phase_are_refused_in_one_line(tmp_path: Path) -> None:
    model, decode = tiny_model(), random_decode_gate()
    prefill = Gate.build(model.config, GateConfig(block_size=BLOCK)).requires_grad_(False)
    folder = save(tmp_path, tiny_model(), decode)
    wrong = random_decode_gate()
    wrong.cfg = replace(wrong.cfg, phase="prefill")
    mixed = save(tmp_path / "mixed", tiny_model(), wrong)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"gate": decode},
            "gate=DecodeGate: expected a gate of phase prefill, or the folder or Hub id of one",
        ),
        ({"qmodel": prefill}, f"qmodel=Gate: expected {ROUTER}"),
        ({"gate": folder}, f"artifact {folder}: kind=decode_gate: expected gate"),
        ({"gate": tmp_path}, f"artifact {tmp_path}: the folder holds decode_gate; expected gate"),
        ({"qmodel": mixed}, f"artifact {mixed}: details.gate.phase=prefill: expected decode"),
    ]
    for options, message in cases:
        with pytest.raises(UserError) as refused, msattn.attach(model, **options):
            pass
        assert str(refused.value) == message


def test_recall_is_the_mass_of_the_best_blocks() -> None:
    model, ids = tiny_model(), random_tokens(1, 150)
    gate = random_decode_gate()
    recalls = decode_gate_recall(gate, model, [{"input_ids": ids[0]}])
    for layer, x in enumerate(inputs_of_layers(model, ids)):
        scores = gate.logits(x, torch.arange(150))
        total = 0.0
        for position in range(150):
            own = position // BLOCK
            ranked = scores[0, :, position, : own + 1].clone()
            ranked[:, [0, own]] = torch.inf
            best = ranked.topk(max(len({0, own}), round(0.5 * (own + 1))), dim=-1).indices
            for head in range(4):
                weights = (
                    x.q[0, head, position] @ x.k[0, head // 2, : position + 1].mT * x.scale
                ).softmax(-1)
                total += float(
                    weights[torch.isin(torch.arange(position + 1) // BLOCK, best[head // 2])].sum()
                )
        assert recalls[f"recall/gate@0.5/layer {layer}"] == pytest.approx(
            total / (4 * 150), rel=1e-4
        )
        assert (
            recalls[f"recall/gate@0.5/layer {layer}"]
            <= recalls[f"recall/oracle@0.5/layer {layer}"] + 0.02
        )
