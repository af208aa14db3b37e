"""The newest pages: a window of the last keys, besides the first ones (StreamingLLM, Xiao et al. 2024)."""

import torch
from torch import Tensor

from msattn.trainer.saap.pages import PageRouter, num_pages


class WindowPages(PageRouter):
    """Visits the last far pages, so that the dense window becomes as long as the reads of other routers."""

    def summarize(self, k: Tensor, start: Tensor | None) -> Tensor:
        """Returns ``[B, Hkv, P, 0]``: the keys do not matter."""
        return k.new_empty(*k.shape[:2], num_pages(k.shape[2]), 0)

    def head_scores(self, summaries: Tensor, q: Tensor) -> Tensor:
        """Returns the number of each page: fp32 ``[B, Hq, P]``."""
        return torch.arange(summaries.shape[2], dtype=torch.float32, device=q.device).expand(*q.shape[:2], -1)
