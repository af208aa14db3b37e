"""AttnGate: scores against plain loops, padding, loss, training, calibrated thresholds,
artifact.
"""

import itertools
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from msattn.kernels import testing
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer.config import LOSSES, BlockSizes, SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.errors import UserError
from msattn.trainer.methods.blocks import AlwaysRead, candidate_blocks, visible_blocks
from msattn.trainer.methods.gate.attn_gate import AttnGate, Gate, GateScores
from msattn.trainer.methods.gate.distillation import GateDistiller, gate_loss, gate_recall
from msattn.trainer.methods.gate.train import gate_thresholds
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import Allocation, calibrate_blocks
from msattn.trainer.models import rope
from msattn.trainer.models.tap import LayerInputs
from tests.factory import inputs_of_layers, left_padded, random_tokens, tiny_config, tiny_model
from tests.kernels.shared import BACKENDS
from tests.methods.gate.random_gates import (
    BLOCK,
    FUNCTIONS,
    config,
    noisy_gate,
    rotated,
    topical_tokens,
)
from tests.methods.layers import blocks_read, geometry, layer_inputs
from tests.sparse import save


def scores_in_loops(gate: Gate, x: LayerInputs) -> Tensor:
    """Scores of one unpadded sequence by the definition, in loops over blocks and heads."""
    layer, cfg = cast(AttnGate, gate.layers[x.layer]), gate.cfg
    group = x.q.shape[1] // x.k.shape[1]
    per_gate = 1 if cfg.heads == "query" else group

    def project(weight: Tensor, tokens: list[Tensor], pools: list[str], block: int) -> Tensor:
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        pooled = torch.cat([FUNCTIONS[pool](t[part]) for t in tokens for pool in pools])
        return (
            rotated(weight @ pooled, gate.inv_freq, block * BLOCK)
            if cfg.rope is True
            else weight @ pooled
        )

    blocks = -(-x.num_queries // BLOCK)
    scores = torch.zeros(layer.heads, blocks, blocks)
    for h in range(layer.heads):
        q, k = (x.q, x.k) if cfg.rope == "model" else (x.q_nope, x.k_nope)
        queries = [q[0, h * per_gate + i] for i in range(per_gate)]
        keys = [k[0, h // group if per_gate == 1 else h]]
        for r in range(blocks):
            gate_q = project(layer.query_weight[h], queries, cfg.q_pool, r)
            logits = torch.stack(
                [gate_q @ project(layer.key_weight[h], keys, cfg.k_pool, c) for c in range(r + 1)]
            )
            mean_q = x.q[0, h * per_gate : (h + 1) * per_gate, r * BLOCK : (r + 1) * BLOCK].mean(
                (0, 1)
            )
            key_head = h // group if per_gate == 1 else h
            mean_k = torch.stack(
                [x.k[0, key_head, c * BLOCK : (c + 1) * BLOCK].mean(0) for c in range(r + 1)]
            )
            means = cast(float, gate.cfg.mean_weight) * x.scale * (mean_k @ mean_q)
            scores[h, r, : r + 1] = (logits / layer.hidden**0.5 + means).softmax(0)
    return scores[None]


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 64),
        ({}, 71),
        ({}, 5),
        ({"heads": "kv"}, 71),
        ({"hidden": 8, "q_pool": ["max", "avg"], "k_pool": ["min"]}, 71),
        ({"q_pool": ["min"], "k_pool": ["avg", "max", "min"]}, 40),
        ({"hidden": 24, "heads": "kv"}, 40),
        ({"rope": False}, 71),
        ({"rope": "model"}, 71),
        ({"mean_weight": 0.0}, 71),
        ({"mean_weight": 8.0, "heads": "kv"}, 71),
    ],
)
@torch.no_grad()
def test_scores_equal_plain_loops(changes, length):
    gate = noisy_gate(config(**changes))
    for x in inputs_of_layers(tiny_model(), random_tokens(1, length)):
        torch.testing.assert_close(gate.scores(x), scores_in_loops(gate, x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", ["query", "kv"])
def test_padding_does_not_change_scores(heads):
    gate, model = noisy_gate(config(heads=heads)), tiny_model()
    rows = [random_tokens(1, n, seed=n)[0] for n in (71, 70, 33, 1)]
    ids, mask = left_padded(rows)
    padded = inputs_of_layers(model, ids, attention_mask=mask)
    for b, row in enumerate(rows):
        for x, alone in zip(padded, inputs_of_layers(model, row[None]), strict=True):
            scores, expected = gate.scores(x), gate.scores(alone)
            blocks = expected.shape[-1]
            torch.testing.assert_close(
                scores[b : b + 1, :, :blocks, :blocks], expected, rtol=1e-4, atol=1e-5
            )
            assert (scores[b, :, blocks:] == 0).all()


@torch.no_grad()
def test_queries_are_the_last_positions_of_longer_keys():
    gate = noisy_gate(config())
    q, k, _ = testing.random_qkv(2, 4, 2, 80, head_size=16)
    layer, start = gate.layers[0], torch.tensor([0, 5], dtype=torch.int32)
    whole = layer(q, k, inv_freq=gate.inv_freq)
    last = layer(q[:, :, 48:], k, inv_freq=gate.inv_freq)
    torch.testing.assert_close(last, whole[:, :, 3:])
    padded = layer(q[:, :, 53:], k, inv_freq=gate.inv_freq, kv_start=start)
    alone = layer(q[1:, :, 53:], k[1:, :, 5:], inv_freq=gate.inv_freq)
    torch.testing.assert_close(padded[1:], alone)


def test_the_last_queries_of_a_prompt_count_one_by_one():
    """The scores of single queries are those of the operation, which has tests of its own."""
    gate = noisy_gate(config(), std=0.2)
    for x in inputs_of_layers(tiny_model(), random_tokens(1, 71)):
        pooled = gate.scores(x)
        assert torch.equal(GateScores(gate)(x), gate.scores(x, last_queries=True))
        assert not torch.equal(GateScores(gate)(x), pooled)
        assert torch.equal(GateScores(gate, last_block="pooled")(x), pooled)
        assert torch.equal(GateScores(gate)(replace(x, ends_prompt=False)), pooled)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_gate_rope_uses_the_models_frequencies_without_attention_factor(rope_type):
    model_config = tiny_config(rope=rope_type)
    inv_freq, _ = rope.inverse_frequencies(model_config, dim=16)
    assert torch.equal(Gate.build(model_config, config()).inv_freq, inv_freq)
    narrow = Gate.build(model_config, config(hidden=8)).inv_freq
    assert narrow.shape == (4,)
    if rope_type == "default":
        torch.testing.assert_close(narrow, inv_freq[::2])


def test_scores_need_every_key_before_rope():
    gate = noisy_gate(config())
    x = inputs_of_layers(tiny_model(), random_tokens(1, 40))[0]
    cached = LayerInputs(
        **{**vars(x), "k": torch.cat([x.k, x.k], 2), "v": torch.cat([x.v, x.v], 2)}
    )
    with pytest.raises(ValueError, match="num_keys=80"):
        gate.scores(cached)


def loss_inputs(padding=None, heads=4):
    q, k, v = testing.random_qkv(1 if padding is None else len(padding), 4, 2, 72, head_size=16)
    kv_start = testing.starts(padding)
    pooled = maxpool_attention(q * 3, k, v, block_size=BLOCK, kv_start=kv_start).pooled
    visible, _ = geometry(72, 72, padding)
    return torch.randn(q.shape[0], heads, 5, 5, requires_grad=True), pooled, visible


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("skip_rows", "padding", "heads"), [(0, None, 4), (2, [0, 30, 71], 2)])
def test_loss_is_the_mean_over_rows_with_visible_blocks(loss, skip_rows, padding, heads):
    logits, pooled, visible = loss_inputs(padding, heads)
    value = gate_loss(logits, pooled, visible, config(loss=loss, skip_rows=skip_rows))
    terms = []
    for b, h, r in itertools.product(range(logits.shape[0]), range(heads), range(skip_rows, 5)):
        seen = visible[min(b, visible.shape[0] - 1), 0, r]
        if not seen.any():
            continue
        group = pooled[b].unflatten(0, (heads, -1))[h, :, r]
        target = (group / group.sum(-1, keepdim=True)).mean(0)[seen]
        gate = logits[b, h, r][seen].softmax(-1)
        if loss == "mse":
            terms.append(((gate - target) ** 2).sum())
        elif loss == "kl":
            terms.append((target * (target / gate).log()).sum())
        else:
            error = (gate - target).abs()
            terms.append(torch.where(error < 0.01, error**2 / 0.02, error - 0.005).sum())
    torch.testing.assert_close(value, torch.stack(terms).mean())
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.isfinite().all()
    assert (gradient.masked_select(~visible.expand_as(gradient)) == 0).all()
    assert gate_loss(logits * 1e4, pooled, visible, config(loss=loss)).isfinite(), (
        "confident wrong scores"
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for infinities
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_an_overflow_is_not_finite(loss, backend, steady_device):
    """The training loop then stops; a target of zeros would be learned."""
    q, k, v = testing.random_qkv(
        1, 4, 2, 72, head_size=16, dtype=torch.float16, device=steady_device
    )
    k[0, 0, 40] = 1e5  # infinite in fp16
    pooled = maxpool_attention(q, k, v, block_size=BLOCK, backend=backend).pooled
    visible, _ = geometry(72, 72, None)
    logits = torch.randn(1, 4, 5, 5, device=steady_device)
    assert not gate_loss(logits, pooled, visible.to(steady_device), config(loss=loss)).isfinite()


@pytest.mark.parametrize(
    ("heads", "target"), [("query", "max"), ("kv", "mass"), ("query", "mean_mass")]
)
def test_precomputed_gradients_equal_autograd(heads, target):
    model = tiny_model()
    ids = random_tokens(2, 71)
    cfg = config(heads=heads, loss="kl", target=target)
    gate = noisy_gate(cfg)
    outputs = GateDistiller(gate, model)(ids)
    (outputs["loss"] * 0.5).backward()
    precomputed = [parameter.grad for parameter in gate.parameters()]
    total = torch.zeros(())
    for x in inputs_of_layers(model, ids):
        pooled = maxpool_attention(
            x.q, x.k, x.v, block_size=BLOCK, pool=target, scale=x.scale
        ).pooled
        loss = gate_loss(gate.logits(x), pooled, visible_blocks(x, cfg.sizes), cfg)
        torch.testing.assert_close(outputs["parts"][f"layer {x.layer}"], loss.detach())
        total = total + loss
    torch.testing.assert_close(outputs["loss"], total)
    for ours, plain in zip(
        precomputed, torch.autograd.grad(total, list(gate.parameters())), strict=True
    ):
        torch.testing.assert_close(ours, plain * 0.5)


def test_distiller_saves_and_trains_only_the_gate():
    model = tiny_model()
    distiller = GateDistiller(noisy_gate(config()), model)
    assert all(name.startswith("gate.") for name in distiller.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    distiller(random_tokens(1, 40))["loss"].backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "kl"])
def test_training_closes_the_gap_to_the_recall_of_the_oracle(loss):
    model = tiny_model(initializer_range=0.3)
    # of what it learns alone
    gate = noisy_gate(config(loss=loss, q_pool=["avg"], k_pool=["avg"], mean_weight=0.0), std=0.1)
    gate.always = AlwaysRead(0, 0)  # else a row of 16 blocks reads no others at 80 %
    chunks = [{"input_ids": row} for row in topical_tokens(2, 16, seed=1)]
    untrained = gate_recall(gate, model, chunks)
    distiller = GateDistiller(gate, model)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        distiller(topical_tokens(2, 16, seed=100 + step))["loss"].backward()
        optimizer.step()
    trained = gate_recall(gate, model, chunks)
    for sparsity in (0.5, 0.8):
        name, oracle = f"recall/gate@{sparsity}", f"recall/oracle@{sparsity}"
        assert trained[oracle] == untrained[oracle]
        gap = trained[oracle] - untrained[name]
        assert gap / 5 < trained[name] - untrained[name] < gap
        layers = [trained[f"{name}/layer {i}"] for i in range(2)]
        assert trained[name] == pytest.approx(sum(layers) / 2)


@pytest.mark.parametrize("floor", [0.0, 0.75])
@pytest.mark.parametrize("sparsity", [0.13, 0.62, 0.8])
def test_calibrated_thresholds_realise_the_mean_sparsity_of_each_layer(sparsity, floor):
    model = tiny_model(initializer_range=0.3)
    gate = noisy_gate(config(), std=0.2)
    ids = topical_tokens(4, 40, seed=2)
    chunks = [{"input_ids": row} for row in ids]
    gate.thresholds = calibrate_blocks(
        {"gate": GateScores(gate)}, model, chunks, always=gate.always, allocation=Allocation(floor)
    )
    selection = Selection.from_config(
        SelectConfig(policy="calibrated", scores="gate", sparsity=sparsity), gate
    )
    candidates = candidate_blocks(layer_inputs(40 * BLOCK), BlockSizes(BLOCK, BLOCK))
    for x in inputs_of_layers(model, ids):
        mask = blocks_read(selection, x)
        # A prompt of so few blocks reads up to 4 % more; between sparsities of the grid, a
        # threshold is interpolated.
        assert 1 - mask.sum() / (candidates.visible.sum() * 16) == pytest.approx(
            sparsity - 0.015, abs=0.025
        )
        assert (
            TopK(sparsity=min(1 - (1 - sparsity) * floor, 0.9999))(GateScores(gate)(x), candidates)
            <= mask
        ).all()
        counts = mask.sum((0, 2, 3))
        assert sparsity == 0 or counts.min() < counts.max()  # budgets differ between heads


def test_one_threshold_for_all_layers_realises_the_mean_sparsity_over_layers():
    model = tiny_model(initializer_range=0.3)
    gate = noisy_gate(config(), std=0.2)
    ids = topical_tokens(4, 40, seed=2)
    with torch.no_grad():  # flat scores in the last layer, which then reads more
        gate.get_parameter("layers.1.query_weight").mul_(0.5)
    gate.thresholds = gate_thresholds(gate, model, [{"input_ids": row} for row in ids])
    for scores, table in gate.thresholds.items():
        assert table.layers[0] == table.layers[1]
        selection = Selection.from_config(
            SelectConfig(policy="calibrated", scores=scores, sparsity=0.7), gate
        )
        visible = geometry(40 * BLOCK, 40 * BLOCK, None)[0].sum() * 16
        read = [blocks_read(selection, x).sum() / visible for x in inputs_of_layers(model, ids)]
        assert sum(read) / 2 == pytest.approx(0.31, abs=0.02)
        assert read[1] > read[0] + 0.02


def test_calibrated_thresholds_hold_for_the_blocks_that_were_always_read():
    model, gate = tiny_model(), noisy_gate(config())
    gate.always = AlwaysRead(2, 1)
    gate.thresholds = gate_thresholds(gate, model, [{"input_ids": random_tokens(1, 400)[0]}])
    assert Selection.from_config(SelectConfig("calibrated"), gate).always == AlwaysRead(
        2, 1, short_rows=16
    )
    with pytest.raises(
        UserError,
        match=r"^select.sink_blocks=1: the gate was calibrated with 2; select.policy=topk accepts "
        r"any",
    ):
        Selection.from_config(SelectConfig("calibrated", sink_blocks=1), gate)
    assert Selection.from_config(SelectConfig("topk", sink_blocks=0), gate).always == AlwaysRead(
        0, 1
    )


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("target", "details.gate has no target"),
        ("mean_weight", "details.gate has no mean_weight"),
        ("thresholds", "no key thresholds"),
    ],
)
def test_an_artifact_without_what_its_scores_depend_on_is_refused(
    tmp_path, monkeypatch, missing, says
):
    gate = noisy_gate(config(target="mass"))
    details = gate.details()
    del (details if missing == "thresholds" else details["gate"])[missing]
    monkeypatch.setattr(gate, "details", lambda: details)
    with pytest.raises(UserError, match=says):
        Gate.load(save(tmp_path, tiny_model(), gate))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": "kv", "hidden": 8, "q_pool": ["avg", "max"], "loss": "kl", "target": "mass"},
        {"block_size": 2 * BLOCK, "key_block_size": BLOCK},
    ],
)
def test_a_loaded_artifact_is_the_same_gate(tmp_path, changes):
    gate = noisy_gate(config(**changes), "llama3")
    gate.thresholds = gate_thresholds(gate, tiny_model(), [{"input_ids": random_tokens(1, 400)[0]}])
    loaded = Gate.load(save(tmp_path, tiny_model(), gate))
    assert loaded.cfg == gate.cfg
    assert loaded.thresholds == gate.thresholds
    assert loaded.always == AlwaysRead(1, 1)
    assert loaded.artifact is not None
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    x = inputs_of_layers(tiny_model(), random_tokens(1, 50))[1]
    assert torch.equal(loaded.scores(x), gate.scores(x))


def test_an_artifact_of_an_older_version_has_blocks_of_as_many_keys_as_queries(
    tmp_path, monkeypatch
):
    gate = noisy_gate(config(block_size=2 * BLOCK))
    details = gate.details()
    del details["gate"]["key_block_size"]
    monkeypatch.setattr(gate, "details", lambda: details)
    sizes = Gate.load(save(tmp_path, tiny_model(), gate)).cfg.sizes
    assert sizes == BlockSizes(2 * BLOCK, 2 * BLOCK)
