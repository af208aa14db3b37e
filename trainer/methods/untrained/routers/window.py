"""The newest blocks: a window of the last keys, besides the first ones (StreamingLLM, Xiao et al.
2024).
"""

import torch
from torch import Tensor

from msattn.trainer.methods.base import Method
from msattn.trainer.methods.key_blocks import count_blocks
from msattn.trainer.methods.untrained.base import UntrainedBlocks
from msattn.trainer.models.layer_attention import LayerInputs


class WindowBlocks(UntrainedBlocks):
    """Reads the last far blocks, which extends the dense window to the number of keys that other
    routers read.
    """

    method = Method("sink and window", style={"color": "#E69F00", "marker": "v"})

    def summarize(self, x: LayerInputs) -> Tensor:
        """Returns ``[B, Hkv, P, 0]``: the keys do not matter."""
        return x.k.new_empty(*x.k.shape[:2], count_blocks(x.num_keys, self.block_size), 0)

    def head_scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the number of each block: fp32 ``[B, Hq, P]``."""
        return torch.arange(summaries.shape[2], dtype=torch.float32, device=q.device).expand(
            *q.shape[:2], -1
        )


router = WindowBlocks
