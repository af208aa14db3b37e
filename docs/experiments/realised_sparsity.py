"""Measures the share of the blocks that calibrated selections leave out, by prompt length:
docs/figures/realised.csv, the table of docs/measurements.md, "Realised sparsity".

``python docs/experiments/realised_sparsity.py OVERRIDES`` takes the overrides of
``msattn eval``: lengths are those of ``eval.ruler.lengths``, sparsities and the number of texts
those of ``eval.perplexity``. Only rows with more than 16 visible blocks are counted, since shorter
rows read little more than the blocks that are always read. The last row is counted separately,
because gates have their own rule for it. Baselines are calibrated on training text at
``data.seq_len``, as in ``msattn eval``. Prints CSV.
"""

from argparse import ArgumentParser
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msattn.trainer import data, models
from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import run_program
from msattn.trainer.evaluate import calibration, compared
from msattn.trainer.models.tap import LayerInputs, visit_layers

LONG = 16  # counted rows have more visible blocks


@torch.inference_mode()
def main() -> None:
    """Prints a line for each scorer, requested sparsity and length: the mean and the extreme
    layers.
    """
    parser = ArgumentParser(description="Measure the share of the blocks that are left out.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn eval")
    cfg: Any = compose(
        "eval", ["eval=perplexity", "select=calibrated", *parser.parse_args().overrides]
    )
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    methods = compared.find_compared(cfg, loaded).on(loaded)
    methods = calibration.calibrate_selections(methods, cfg, loaded)
    settings = [
        (str(method.method), sparsity, method.selection(replace(method.select, sparsity=sparsity)))
        for method in methods.block_selections
        if method.select.policy == "calibrated"
        for sparsity in cfg.eval.perplexity.sparsities
    ]
    print("scores,sparsity,length,realised,least_layer,most_layer,last_row", flush=True)
    for length in cfg.eval.ruler.lengths:
        size = {"seq_len": length, "num_chunks": cfg.eval.perplexity.num_chunks}
        chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, **size)
        shares: dict[tuple[str, float], dict[int, list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )

        def count(x: LayerInputs, shares: Any = shares) -> None:
            scores = {name: selection.scorer(x) for name, _, selection in settings}
            for name, sparsity, selection in settings:
                mask = selection.choose(scores[name], x)
                visible = selection.candidates(x).row_visible[..., 0]
                shares[name, sparsity][x.layer].append(
                    (1 - mask.sum(-1) / visible).mean((0, 1))[LONG:]
                )

        visit_layers(loaded.model, count, (chunks[i] for i in range(len(chunks))))
        for (name, sparsity), by_layer in shares.items():
            # [layers, rows]
            rows = torch.stack([torch.stack(of_layer).mean(0) for of_layer in by_layer.values()])
            layers, last = rows[:, :-1].mean(1), rows[:, -1].mean()
            figures = layers.mean(), layers.min(), layers.max(), last
            print(
                f"{name},{sparsity},{length},{','.join(f'{figure:.4f}' for figure in figures)}",
                flush=True,
            )


if __name__ == "__main__":
    run_program(main)
