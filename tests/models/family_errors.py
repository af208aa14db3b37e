"""Prints a table: how much the logits of each family change under ``attach`` if all blocks and all
buckets are read.

Usage: python -m tests.models.family_errors
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.serving.attach import attach
from tests.factory import FAMILIES, OTHER_FAMILIES, random_tokens, tiny_model
from tests.sparse import BUCKETS, gate_for, partition_for, run_in_passes

PROMPT, NEW = 200, 24  # tokens
BATCH = 2
EVERYTHING: dict[str, Any] = {
    "select": "topk",
    "sparsity": 0.0,
    "probes": BUCKETS,
    "dense_below": 0,
}
WINDOW: dict[str, Any] = {"recent": 1, "sink": 0, "dense_layers": ()}


@torch.no_grad()
def errors(family: str) -> tuple[float, float, float, bool]:
    """Returns the largest logit, the largest differences in prompts and of new tokens, and whether
    greedy tokens are equal.

    The new tokens are those of greedy decoding without ``attach``, so that both sides read the same
    ones.
    """
    model, ids = tiny_model(family), random_tokens(BATCH, PROMPT)
    greedy = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens = model.generate(ids, **greedy)

    def logits() -> Tensor:
        return run_in_passes(model, tokens, [PROMPT, *[1] * NEW], torch.ones_like(tokens))

    dense = logits()
    with attach(
        model, gate=gate_for(model), qmodel=partition_for(model), **EVERYTHING, **WINDOW
    ) as sparse:
        difference = (logits() - dense).abs()
        same = torch.equal(model.generate(ids, **greedy), tokens)
        stats = sparse.stats()
    assert (
        stats["sparsity"],
        stats["selectivity"],
        stats["dense_fallbacks"],
        stats["dense_by_choice"],
    ) == (0, 1, 0, 0)
    return (
        dense.abs().max().item(),
        difference[:, :PROMPT].max().item(),
        difference[:, PROMPT:].max().item(),
        same,
    )


def main() -> None:
    warnings.simplefilter("ignore")
    print(
        "| `model_type` | largest logit | prompt | new tokens | equal tokens |\n| --- | --- | --- "
        "| --- | --- |"
    )
    for family in (*FAMILIES, *OTHER_FAMILIES):
        largest, prompt, new, same = errors(family)
        print(
            f"| `{family}` | {largest:.1f} | {prompt:.1e} | {new:.1e} | {'yes' if same else 'no'} "
            f"|",
            flush=True,
        )


if __name__ == "__main__":
    main()
