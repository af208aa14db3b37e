"""Attention mass in the top keys, by head (SAAP, figure 3), and in the top blocks of a prefill."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.tasks.analysis.queries import BATCH_SCORES, SHARES, Queries, counts_of
from msattn.trainer.methods.base import Method
from msattn.trainer.models.tap import LayerInputs

SCORED = 0.01  # share of the keys whose mass is the score of a row
QUERY_BLOCKS = 4  # per chunk
ALL, FAR = "all keys", "outside the window"
MASS_IN_KEYS = Method("mass in top keys", "all keys, mean")
MASS_IN_BLOCKS = Method("mass in top blocks", "prefill blocks, mean")


def share_in_top(mass: Tensor, counts: Tensor) -> Tensor:
    """Returns the share ``[H, n, S]`` of each row of ``mass [H, n, M]`` in its ``counts [n, S]``
    largest entries.
    """
    ordered = mass.sort(-1, descending=True).values.cumsum(-1)
    return ordered.gather(-1, (counts - 1).expand(len(mass), -1, -1)) / ordered[..., -1:]


def top_blocks(x: LayerInputs, head: int, block_size: int) -> Tensor | None:
    """Returns the share of a query block's mass in the top ``SHARES`` of its key blocks: fp64
    ``[group, blocks, S]``.

    Measures up to ``QUERY_BLOCKS`` blocks, evenly spaced over the second half of the chunk; None
    without a full block.
    """
    blocks = x.num_keys // block_size
    if not blocks:
        return None
    group = x.q.shape[1] // x.k.shape[1]
    q, k = x.q[0, head * group : (head + 1) * group].float(), x.k[0, head].float()
    shares = []
    for block in (
        torch.linspace(blocks // 2, blocks - 1, min(QUERY_BLOCKS, blocks - blocks // 2))
        .round()
        .long()
        .tolist()
    ):
        end = (block + 1) * block_size
        mass = torch.zeros(group, block + 1, device=q.device)
        for rows in torch.arange(block * block_size, end, device=q.device).split(
            max(1, BATCH_SCORES // (group * end))
        ):
            logits = x.capped(q[:, rows] @ k[:end].T * x.scale)
            hidden = torch.arange(end, device=q.device) > rows[:, None]
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            mass += F.avg_pool1d(weights.sum(1)[:, None], block_size)[:, 0]
        visible = torch.tensor([block + 1], device=q.device)
        shares.append(share_in_top(mass[:, None], counts_of(SHARES, visible))[:, 0])
    return torch.stack(shares, dim=1).double()


@dataclass
class TopMass:
    """Shares of the mass of queries or query blocks, ``[group, n, S]``, by kind, layer and
    key/value head.
    """

    block_size: int
    heads: list[int]
    shares: dict[tuple[str, int, int], list[Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add_queries(self, x: LayerInputs, head: int, queries: Queries) -> None:
        """Adds the mass in the top keys of all visible keys, and of those outside the window."""
        for kind, mask in ((ALL, queries.visible), (FAR, queries.far)):
            mass = queries.logits.masked_fill(~mask, -torch.inf).softmax(-1)
            self.shares[kind, x.layer, head].append(
                share_in_top(mass, counts_of(SHARES, mask.sum(-1))).double().cpu()
            )

    def add_blocks(self, x: LayerInputs, head: int) -> None:
        shares = top_blocks(x, head, self.block_size)
        if shares is not None:
            self.shares[f"blocks of {self.block_size}", x.layer, head].append(shares.cpu())

    def rows(self, length: int, num_chunks: int) -> Iterator[EvalRow]:
        """Yields a row for each kind; the score is the mean share of mass in the top ``SCORED`` of
        the keys or blocks.
        """
        scored, name = SHARES.index(SCORED), f"mass in the top {SCORED:.0%}"
        for kind in dict.fromkeys(kind for kind, _, _ in self.shares):
            layers = sorted({layer for other, layer, _ in self.shares if other == kind})
            every = [
                [torch.cat(self.shares[kind, layer, head], 1) for head in self.heads]
                for layer in layers
            ]
            by_head = torch.stack([torch.cat(heads).mean(1) for heads in every])  # [layers, Hq, S]
            curve = by_head.mean((0, 1)).tolist()
            extra = {
                "length": length,
                **{f"top {share:.0%}": mass for share, mass in zip(SHARES, curve, strict=True)},
                "layers": layers,
                "kv_heads": self.heads,
                "heads": by_head[..., scored].tolist(),
                "shares": list(SHARES),
                "by_layer": by_head.mean(1).tolist(),
                "by_head": by_head.tolist(),
            }
            method = MASS_IN_KEYS if kind in (FAR, ALL) else MASS_IN_BLOCKS
            yield EvalRow(
                "analysis",
                method,
                Setting(kind),
                curve[scored],
                name,
                samples=num_chunks,
                extra=extra,
            )
