"""Decoding with decode gates: the keys that are read, against a direct computation in fp64, and
attached models.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.serving.attach import attach
from tests.factory import inputs_of_layers, random_tokens, tiny_model
from tests.methods.gate.random_gates import BLOCK, random_decode_gate
from tests.serving.decoding import close, models

RECENT, SINK, BLOCKS = 20, 2, 16
OPTIONS: dict[str, Any] = {"recent": RECENT, "sink": SINK, "dense_layers": (), "dense_below": 0}


def blocks_to_read(gate: Any, x: Any, probes: int, threshold: float | None = None) -> Tensor:
    """Returns bool ``[Hkv, M]``: what the last query of a prompt reads besides the dense window;
    scores are the gate's own.
    """
    at = x.num_keys - 1
    far = (at - RECENT) // BLOCK + 1
    logits = gate.logits(x, torch.tensor([at]))[0, :, 0, :far]
    if threshold is None:
        chosen = [each.topk(min(probes, far)).indices for each in logits]
    else:
        chosen = [(each.softmax(-1) >= threshold).nonzero()[:, 0] for each in logits]
    return torch.stack([torch.isin(torch.arange(x.num_keys) // BLOCK, each) for each in chosen])


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize(("reads", "probes", "threshold"), [
    ({"probes": 0}, 0, None), ({"probes": 2}, 2, None), ({"keys": 3 * BLOCK + 5}, 3, None),
    ({"threshold": 0.2}, 0, 0.2),
])  # fmt: skip
@torch.no_grad()
def test_a_token_reads_the_best_blocks_and_no_more(
    group: int, reads: dict[str, Any], probes: int, threshold: float | None
) -> None:
    """The first layer's queries do not depend on what is read: there, as many keys are read as
    said.
    """
    model, gate = models(group)
    ids = random_tokens(1, 230)
    x = inputs_of_layers(model, ids)[0]
    far = blocks_to_read(gate, x, probes, threshold)
    position = torch.arange(230)
    read = far | (position < SINK) | (position > 229 - RECENT)
    with attach(
        model, qmodel=gate, measure_recall=True, **OPTIONS | {"dense_layers": (1,)} | reads
    ) as sparse:
        cache: Any = DynamicCache()
        model(ids[:, :-1], past_key_values=cache)
        model(ids[:, -1:], past_key_values=cache)
        stats = sparse.stats()
    assert stats["selectivity"] == pytest.approx(read.float().mean().item())
    weights = (x.q[0, :, -1:] @ x.k[0].repeat_interleave(group, 0).mT * x.scale).softmax(-1)[:, 0]
    mass = (weights * read.repeat_interleave(group, 0)).sum(-1).mean()
    assert stats["decode_recall"] == pytest.approx(mass.item(), rel=1e-4)


def decoded(model: Any, ids: Tensor, passes: list[int], cache: Any) -> Tensor:
    """Returns the logits of the last of ``passes``, which end at these positions."""
    logits, first = torch.empty(0), cache.get_seq_length()
    for end in passes:
        logits = model(ids[:, first:end], past_key_values=cache).logits
        first = end
    return logits


@torch.no_grad()
def test_chunks_drafts_and_crops_read_as_one_prompt(where: str) -> None:
    """However the cache came about, a token reads the same keys, also after an index that held
    removed ones.
    """
    model, gate = tiny_model().to(where), random_decode_gate(std=1.0)
    ids = random_tokens(1, 200).to(where)
    with attach(model, qmodel=gate, probes=2, **OPTIONS):
        expected = decoded(model, ids, [179, 180], DynamicCache())
        close(decoded(model, ids, [50, 131, 179, 180], DynamicCache()), expected)  # chunks
        cache: Any = DynamicCache()
        together = decoded(model, ids, [179, 183], cache)  # drafts
        close(together[:, :1], expected)
        cache.crop(-4)
        close(decoded(model, ids, [180], cache), expected)
        longer: Any = DynamicCache()
        decoded(model, ids, [200], longer)  # all of them are in the index
        for layer in longer.layers:
            assert layer.indexed == 200
        longer.crop(-21)
        assert all(179 - BLOCK < layer.indexed <= 179 for layer in longer.layers)
        close(decoded(model, ids, [180], longer), expected)
        cached = DynamicCache()
    decoded(model, ids, [170, 179], cached)  # filled outside of the context
    with attach(model, qmodel=gate, probes=2, **OPTIONS):
        close(decoded(model, ids, [180], cached), expected)


@torch.no_grad()
def test_blocks_completed_after_a_crop_are_not_those_of_the_prompt(where: str) -> None:
    """Their pooled keys are rotated at the position of their last key, if the gate says so."""
    model, gate = tiny_model().to(where), random_decode_gate(std=1.0)
    gate.finished_at = "last"
    ids = random_tokens(1, 200).to(where)
    cropped: Any = DynamicCache()
    expected: Any = DynamicCache()
    with attach(model, qmodel=gate, probes=2, **OPTIONS):
        decoded(model, ids, [200], cropped)
        cropped.crop(-100)
        decoded(model, ids, [132, 164], cropped)
        decoded(model, ids, [100, 132, 164], expected)
    found, wanted = (cache.layers[0] for cache in (cropped, expected))
    assert found.indexed == wanted.indexed == 164
    blocks = -(-164 // BLOCK)
    close(found.summaries[:, :, :blocks], wanted.summaries[:, :, :blocks])


@torch.no_grad()
def test_beams_read_as_their_sequences_alone(where: str) -> None:
    """Reordered rows keep their index and summaries."""
    model, gate = tiny_model().to(where), random_decode_gate(std=1.0)
    ids = random_tokens(3, 150).to(where)
    order = torch.tensor([2, 0, 2], device=where)
    with attach(model, qmodel=gate, probes=1, **OPTIONS):
        cache, expected = DynamicCache(), DynamicCache()
        decoded(model, ids, [149], cache)
        cache.reorder_cache(order)
        decoded(model, ids[order], [149], expected)
        close(decoded(model, ids[order], [150], cache), decoded(model, ids[order], [150], expected))
        beams = model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
        for row in range(3):
            alone = model.generate(
                ids[row : row + 1], max_new_tokens=8, num_beams=3, do_sample=False
            )
            assert torch.equal(alone[0], beams[row])
