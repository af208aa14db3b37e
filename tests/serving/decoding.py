"""Settings of a router, greedy generation and comparisons, which the tests of decoding share."""

from typing import Any

import torch
from torch import Tensor

from msattn.trainer.serving.attach import Sparse
from tests.factory import random_partition, tiny_model
from tests.methods.gate.random_gates import random_decode_gate
from tests.sparse import BUCKETS

ROUTED: dict[str, Any] = {
    "qmodel": random_partition(),
    "probes": 2,
    "recent": 5,
    "dense_layers": (0,),
}
ALL_BUCKETS = {**ROUTED, "probes": BUCKETS}


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Returns the logits of greedy generation ``[tokens, B, vocabulary]``."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {
        "max_new_tokens": 20,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        **options,
    }
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    return torch.stack(model.generate(**inputs, **arguments).logits).cpu()


def check_steps(sparse: Sparse, device: str, tokens: int) -> None:
    """Asserts that ``tokens`` were decoded in steps, nearly all of them as graphs on a GPU."""
    stats = sparse.stats()
    assert stats["graph_steps"] + stats["eager_steps"] == tokens
    if device == "cuda":
        assert stats["graph_steps"] > 0.7 * tokens


def close(a: Tensor, b: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def models(group: int) -> tuple[Any, Any]:
    """A model whose key/value heads serve ``group`` query heads, and random decode gates for it."""
    heads = {1: (2, 2), 2: (4, 2), 4: (4, 1), 7: (7, 1)}[group]
    sizes = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_size": 16 * heads[0],
    }
    return tiny_model(**sizes), random_decode_gate(std=1.0, **sizes)
