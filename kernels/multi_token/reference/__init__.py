"""References of the operations of multi-token attention; see :mod:`msattn.kernels.reference`."""

from msattn.kernels.multi_token.reference.conv_attention import conv_attention as conv_attention
from msattn.kernels.multi_token.reference.conv_attention import (
    conv_attention_backward as conv_attention_backward,
)
from msattn.kernels.multi_token.reference.conv_attention import (
    conv_attention_forward as conv_attention_forward,
)
from msattn.kernels.multi_token.reference.conv_decode import conv_decode as conv_decode
from msattn.kernels.multi_token.reference.head_mix_attention import (
    head_mix_attention as head_mix_attention,
)
from msattn.kernels.multi_token.reference.head_mix_attention import (
    head_mix_attention_backward as head_mix_attention_backward,
)
from msattn.kernels.multi_token.reference.head_mix_attention import (
    head_mix_attention_forward as head_mix_attention_forward,
)
