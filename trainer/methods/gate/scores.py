"""Scores of key blocks by a gate: its probabilities, alone or with the exact attention of a
prompt's last queries.

A gate scores blocks for each row independently, without the question that often ends a prompt. The
last queries contain the question, and other rows also need the keys that these queries attend to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from msattn.trainer.config import BlockSizes
from msattn.trainer.methods.base import Method, Scorer
from msattn.trainer.methods.blocks import RowCandidates, normalize_rows, row_span
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.last_queries import last_masses, last_positions
from msattn.trainer.methods.thresholds import Allocation
from msattn.trainer.models.layer_attention import LayerInputs

LAST_QUERIES = 64
# weight of the mean attention of the last queries; 1 finds answers as well and loses more
# perplexity
COLUMNS = 0.5


@dataclass(frozen=True)
class GateScores(Scorer):
    """Scores blocks by the probabilities of a trained gate.

    The last row block often holds a question in which only some tokens look far back, which pooling
    hides. With ``last_block="queries"`` its scores are therefore the largest probability over the
    pooled queries and each of the last ``block_size`` queries; this applies only to the last chunk
    of a prompt. With ``"pooled"`` only the pooled queries count, as in the paper.

    ``last_chunk_needs_keys`` says whether the scores of the last chunk of a prompt need every key,
    not only pooled keys.
    """

    method: ClassVar = Method(
        "gate", trained=True, style={"color": "#0072B2", "marker": "o"}, other_color="#7B68EE"
    )
    allocation: ClassVar = Allocation(floor=0.5, pooled=True)
    last_chunk_needs_keys: ClassVar[bool] = False
    gate: Gate
    last_block: str = "queries"

    @property
    def sizes(self) -> BlockSizes:
        return self.gate.cfg.sizes

    @final
    def __call__(self, x: LayerInputs) -> Tensor:
        return self.gate.scores(x, **self.given(x))

    @final
    def select(
        self,
        x: LayerInputs,
        candidates: RowCandidates,
        counts: Tensor,
        limit: Mapping[str, Any],
    ) -> Tensor:
        """Returns the bits of a block mask, int32 ``[B, Hq | Hkv, Tr, ceil(Tc / 32)]``, without
        holding scores.

        ``counts`` and ``limit`` are the number of the best blocks and the threshold of
        :class:`~msattn.trainer.config.policies.Best`.
        """
        return self.gate.select(x, candidates, counts, limit, **self.given(x))

    def given(self, x: LayerInputs) -> dict[str, Any]:
        """Returns what the scores of a pass take into account besides pooled queries, arguments of
        :meth:`Gate.scores`. Scores of another kind override this, for :meth:`select` too.
        """
        return {"last_queries": self.last_block == "queries" and x.ends_prompt}


@dataclass(frozen=True)
class QuestionScores(GateScores):
    """Scores blocks by a gate and by the exact attention of the last queries of a prompt.

    A block's score in a row is the gate's probability or half of the block's share of the attention
    of the last queries, whichever is larger; rows sum to 1. The row block of the last query gets
    its exact block map: the largest mass of its queries in each block. A row block that also
    contains earlier queries gets the maximum of both.

    Only the last chunk of a prompt contains the question. Earlier chunks use the gate's
    probabilities alone; the last chunk uses the attention of its own last queries.
    """

    method: ClassVar = Method(
        "gate_question",
        "gate and question",
        trained=True,
        style={"color": "#009E73", "marker": "P"},
        other_color="#66C2A5",
    )
    last_chunk_needs_keys: ClassVar = True

    @torch.no_grad()
    def given(self, x: LayerInputs) -> dict[str, Any]:
        """Returns the attention of the last queries: least scores of columns, and of the last
        rows.
        """
        if not x.ends_prompt:
            return {}
        masses = last_masses(x, LAST_QUERIES, self.sizes.keys)
        if self.gate.cfg.heads == "kv":  # a gate head serves all query heads of a group
            masses = masses.unflatten(1, (x.k.shape[1], -1)).amax(2)  # [B, Hg, n, Tc]
        last_rows, whole = self._exact_rows(x, masses)
        columns = COLUMNS * normalize_rows(masses.sum(2))
        return {"columns": columns, "last_rows": last_rows, "whole": whole}

    def _exact_rows(self, x: LayerInputs, masses: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the exact scores of the row blocks that hold the last queries, of which
        ``masses [B, Hg, n, Tc]`` are the attention, and the row blocks without other queries.
        """
        n, size = masses.shape[2], self.sizes.queries
        rows = row_span(x.num_queries, x.num_keys, size, x.kv_start, x.q.device)
        positions = last_positions(x, n)
        touched = min(rows.last.shape[1], 1 + -(-(n - 1) // size))
        last_row = rows.last.argmax(1)  # it holds the last query; row blocks after it are empty
        base = (last_row[:, None] - (touched - 1)).clamp(min=0)
        # padded queries, before row 0, have no mass
        row = ((positions - rows.first[:, :1]) // size - base).clamp(min=0)
        exact = masses.new_zeros(*masses.shape[:2], touched, masses.shape[3])
        exact.scatter_reduce_(2, row[:, None, :, None].expand_as(masses), masses, "amax")
        index = base + torch.arange(touched, device=x.q.device)
        return normalize_rows(exact), rows.first.gather(1, index) >= positions[:, :1]


# by their names in ``select.scores``
GATE_SCORERS: dict[str, type[GateScores]] = {
    each.method.name: each for each in (GateScores, QuestionScores)
}
