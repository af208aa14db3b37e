"""Attention mass in the top keys, by head (SAAP, figure 3), and in the top blocks of a prefill."""

from collections import defaultdict
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
    """Returns the share ``[H, n, S]`` of each row of ``mass [H, n, M]`` in its ``counts [n, S]`` largest entries."""
    ordered = mass.sort(-1, descending=True).values.cumsum(-1)
    return ordered.gather(-1, (counts - 1).expand(len(mass), -1, -1)) / ordered[..., -1:]


def top_keys(queries: Queries, mask: Tensor) -> Tensor:
    """Returns the share of the mass of the keys in ``mask [n, M]`` that their top ``SHARES`` have, summed over n."""
    mass = queries.logits.masked_fill(~mask, -torch.inf).softmax(-1)
    return share_in_top(mass, counts_of(SHARES, mask.sum(-1))).double().sum(1)


def top_blocks(x: LayerInputs, head: int, block_size: int) -> Tensor | None:
    """Returns the share of a query block's mass in the top ``SHARES`` of its key blocks: fp64 ``[group, blocks, S]``.

    Measures up to ``QUERY_BLOCKS`` blocks, evenly spaced over the second half of the chunk; None without a full block.
    """
    blocks = x.num_keys // block_size
    if not blocks:
        return None
    group = x.q.shape[1] // x.k.shape[1]
    q, k = x.q[0, head * group : (head + 1) * group].float(), x.k[0, head].float()
    found = []
    for block in torch.linspace(blocks // 2, blocks - 1, min(QUERY_BLOCKS, blocks - blocks // 2)).round().long().tolist():
        end = (block + 1) * block_size
        mass = torch.zeros(group, block + 1, device=q.device)
        for rows in torch.arange(block * block_size, end, device=q.device).split(max(1, BATCH_SCORES // (group * end))):
            logits = x.capped(q[:, rows] @ k[:end].T * x.scale)
            hidden = torch.arange(end, device=q.device) > rows[:, None]
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            mass += F.avg_pool1d(weights.sum(1)[:, None], block_size)[:, 0]
        visible = torch.tensor([block + 1], device=q.device)
        found.append(share_in_top(mass[:, None], counts_of(SHARES, visible))[:, 0])
    return torch.stack(found, dim=1).double()


@dataclass
class TopMass:
    """Sums of the share of mass: ``{(kind, layer, key/value head): (sum [group, S] over queries, their number)}``."""

    block_size: int
    heads: list[int]
    sums: dict[tuple[str, int, int], tuple[Tensor, int]] = field(default_factory=dict)

    def add_queries(self, x: LayerInputs, head: int, queries: Queries) -> None:
        """Adds the mass in the top keys of all visible keys, and of those outside the window."""
        for kind, mask in ((ALL, queries.visible), (FAR, queries.far)):
            self._add((kind, x.layer, head), top_keys(queries, mask), len(queries.positions))

    def add_blocks(self, x: LayerInputs, head: int) -> None:
        found = top_blocks(x, head, self.block_size)
        if found is not None:
            self._add((f"blocks of {self.block_size}", x.layer, head), found.sum(1), found.shape[1])

    def rows(self, length: int, num_chunks: int) -> list[EvalRow]:
        """Returns a row for each kind; the score is the mean share of mass in the top ``SCORED`` of the keys or blocks."""
        kinds = defaultdict(set)
        for kind, layer, _ in self.sums:
            kinds[kind].add(layer)
        return [self._row(kind, sorted(layers), length, num_chunks) for kind, layers in kinds.items()]

    def _add(self, key: tuple[str, int, int], total: Tensor, count: int) -> None:
        before, number = self.sums.get(key, (torch.zeros_like(total, device="cpu"), 0))
        self.sums[key] = before + total.cpu(), number + count

    def _row(self, kind: str, layers: list[int], length: int, num_chunks: int) -> EvalRow:
        means = [[total / count for head in self.heads for total, count in [self.sums[kind, layer, head]]] for layer in layers]
        by_head = torch.stack([torch.cat(heads) for heads in means])  # [layers, Hq, S]
        scored = SHARES.index(SCORED)
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
        method, name = MASS_IN_KEYS if kind in (FAR, ALL) else MASS_IN_BLOCKS, f"mass in the top {SCORED:.0%}"
        return EvalRow("analysis", method, Setting(kind), curve[scored], name, samples=num_chunks, extra=extra)
