"""Decoding of the families whose layers are not Llama's: never in a step, with one warning on a
GPU.
"""

import warnings

import pytest
import torch

from msattn.trainer.serving.graphs.fused import fused
from tests.factory import OTHER_FAMILIES, left_padded, random_tokens, tiny_model
from tests.serving.decoding import close, generate
from tests.sparse import BUCKETS, attached


@torch.no_grad()
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_tokens_are_decoded_in_ordinary_passes(family: str, where: str) -> None:
    model = tiny_model(family).to(where)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (70, 41)])
    dense = generate(model, ids, mask, max_new_tokens=8)
    with (
        warnings.catch_warnings(record=True) as caught,
        attached(model, sparsity=0.0, probes=BUCKETS) as sparse,
    ):
        warnings.simplefilter("always")
        close(generate(model, ids, mask, max_new_tokens=8), dense)
        stats = sparse.stats()
    assert (stats["graph_steps"], stats["eager_steps"], stats["dense_fallbacks"]) == (0, 7, 0)
    assert (stats["sparsity"], stats["selectivity"]) == (0, 1)
    assert sum("runs without CUDA graphs" in str(each.message) for each in caught) == (
        where == "cuda"
    )


@pytest.mark.parametrize("family", [*OTHER_FAMILIES, "mistral"])
def test_only_llamas_layers_are_fused(family: str) -> None:
    """Norms of other families round elsewhere, or add 1 to their weights."""
    model = tiny_model(family)
    with fused(model.model):
        replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert bool(replaced) == (family == "mistral")
