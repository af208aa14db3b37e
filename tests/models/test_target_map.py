"""The block map of outputs against a plain computation with the model's own output projection."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msattn.kernels.testing import starts
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.errors import UserError
from msattn.trainer.models import target_map as maps
from msattn.trainer.models.layer_attention import LayerInputs, block_map
from msattn.trainer.models.target_map import OUTPUT, target_map
from tests.factory import inputs_of_layers, random_tokens, tiny_model


def plain_map(x: LayerInputs, sizes: BlockSizes) -> Tensor:
    """Returns the map in fp64, from the outputs after W_O of each query, head and column block."""
    assert x.o_proj is not None
    batch, heads, queries, width = x.q.shape
    before = x.k.shape[2] - queries
    blocks = -(-queries // sizes.queries), -(-x.k.shape[2] // sizes.keys)
    result = torch.zeros(batch, heads, *blocks, dtype=torch.float64)
    w_o: Any = x.o_proj.weight
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        head = h // (heads // x.k.shape[1])
        start = 0 if x.kv_start is None else int(x.kv_start[b])
        first = max(start - before, 0)
        k, v = x.k[b, head, start:].double(), x.v[b, head, start:].double()
        norms = torch.zeros(queries - first, blocks[1], dtype=torch.float64)
        for i in range(first, queries):
            seen = before + i + 1 - start
            scores = x.capped(k[:seen] @ x.q[b, h, i].double() * x.scale)
            if x.scoring.sinks is not None:
                scores = torch.cat([scores, x.scoring.sinks[h, None].double()])
            added = scores.softmax(0)[:seen, None] * v[:seen]
            for c, share in enumerate(added.split(sizes.keys)):
                of_head = w_o[:, h * width : (h + 1) * width].double()
                norms[i - first, c] = (of_head @ share.sum(0)).norm()
        for r, rows in enumerate(norms.split(sizes.queries)):
            result[b, h, r] = rows.mean(0)
    return result


@pytest.mark.parametrize(
    ("family", "padding", "cached", "sizes"),
    [
        ("llama", None, 0, BlockSizes(16, 16)),
        ("llama", (0, 37), 0, BlockSizes(32, 16)),
        ("llama", (5, 61), 20, BlockSizes(16, 32)),
        ("gpt_oss", None, 0, BlockSizes(16, 16)),
        ("gemma2", None, 30, BlockSizes(32, 16)),
    ],
)
def test_norms_are_those_of_outputs(
    family: str,
    padding: tuple[int, int] | None,
    cached: int,
    sizes: BlockSizes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(maps.OUTPUTS_AT_ONCE, "cpu", 1)  # one row block
    model = tiny_model(family)
    ids = random_tokens(2, 71)
    kv_start = None if padding is None else starts(padding)
    for x in inputs_of_layers(model, ids):
        x = replace(x, q=x.q[:, :, cached:], kv_start=kv_start)
        got = target_map(x, sizes, OUTPUT)
        dense = block_map(x, sizes, "mass")
        assert torch.equal(got.out, dense.out)
        assert torch.equal(got.lse, dense.lse)
        expected = plain_map(x, sizes)
        torch.testing.assert_close(got.pooled.double(), expected, rtol=1e-4, atol=1e-6)
        assert (got.pooled[dense.pooled == 0] == 0).all()
        part = x.of_heads(slice(1, 2))
        own = target_map(part, sizes, OUTPUT).pooled
        torch.testing.assert_close(own, got.pooled[:, part.q.shape[1] :][:, : own.shape[1]])


def test_other_projections_are_refused() -> None:
    (x, *_) = inputs_of_layers(tiny_model(), random_tokens(1, 20))
    scaled = nn.Linear(64, 64).to(torch.float8_e4m3fn)  # its scale is elsewhere
    for o_proj in (None, nn.Identity(), nn.Linear(32, 64), nn.Linear(65, 64), scaled):
        with pytest.raises(UserError, match=r"gate\.target=output: the output projection of layer"):
            target_map(replace(x, o_proj=o_proj), BlockSizes(16, 16), OUTPUT)


def test_a_head_without_weights_adds_nothing() -> None:
    (x, *_) = inputs_of_layers(tiny_model(), random_tokens(1, 40))
    pruned = nn.Linear(64, 64)
    with torch.no_grad():
        pruned.weight[:, :16] = 0
    pooled = target_map(replace(x, o_proj=pruned), BlockSizes(16, 16), OUTPUT).pooled
    assert (pooled[:, 0] == 0).all()
    assert (pooled[:, 1:, 0, 0] > 0).all()
