"""Score modifications that are built in; :class:`msattn.kernels.types.ScoreMod` says how to write another.

    softcap(t)          t * tanh(s / t)
    alibi(slopes)       s + slopes[h] * (j - i)
    sliding_window(w)   s where j > i - w, else -inf

Each is written twice, as a jitted function of tiles and as its PyTorch twin. They go by name through the schema of an
operator, which takes no functions: :func:`built_in` makes them again from it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from msattn.kernels.common.primitives import LN_2, tl, triton
from msattn.kernels.types import ScoreMod


def softcap(limit: float) -> ScoreMod:
    """Scores bent smoothly into ``(-limit, limit)``, as in Gemma 2 (arXiv 2408.00118): ``limit * tanh(score / limit)``.

    Raises
    ------
    ValueError
        If the limit is not a positive, finite number.
    """
    if not 0 < limit < math.inf:
        raise ValueError(f"limit={limit!r}: expected a positive, finite number")
    return ScoreMod(_softcap_kernel, _softcap, numbers=(float(limit),), built_in="softcap")


def alibi(slopes: Tensor) -> ScoreMod:
    """A penalty that grows with distance (arXiv 2108.12409): ``score + slopes[h] * (j - i)``.

    Parameters
    ----------
    slopes : Tensor fp32 ``[Hq]``
        One for each query head, on the device of q.

    Raises
    ------
    ValueError
        If the slopes are no fp32 vector.
    """
    if slopes.dtype != torch.float32 or slopes.dim() != 1:
        raise ValueError(f"slopes is {slopes.dtype} {tuple(slopes.shape)}: expected float32 [query heads]")
    return ScoreMod(_alibi_kernel, _alibi, tensors=(slopes.contiguous(),), built_in="alibi")


def sliding_window(width: int) -> ScoreMod:
    """Query i sees keys ``j > i - width`` alone; what lies before the window of every query is not read.

    Raises
    ------
    ValueError
        If the width is no whole number of keys, at least 1.
    """
    if width < 1 or width != int(width):
        raise ValueError(f"width={width!r}: expected a whole number of keys, 1 or more")
    return ScoreMod(_window_kernel, _window, numbers=(int(width),), window=int(width), built_in="sliding_window")


def built_in(name: str, tensors: Sequence[Tensor], numbers: Sequence[float]) -> ScoreMod:
    """The modification of that name again, from what it holds."""
    return {"softcap": softcap, "alibi": alibi, "sliding_window": sliding_window}[name](*tensors, *numbers)


@triton.jit
def _softcap_kernel(score, b, h, i, j, limit):
    x = score / limit
    decay = tl.exp2(tl.abs(x) * (-2 / LN_2))
    far = (1 - decay) / (1 + decay)
    x2 = x * x
    near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))  # where 1 - decay would cancel
    return limit * tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


def _softcap(score, b, h, i, j, limit):
    return limit * (score / limit).tanh()


@triton.jit
def _alibi_kernel(score, b, h, i, j, slopes):
    return score + tl.load(slopes + h) * (j - i).to(tl.float32)


def _alibi(score, b, h, i, j, slopes):
    return score + slopes[h].to(score.dtype) * (j - i)


@triton.jit
def _window_kernel(score, b, h, i, j, width):
    return tl.where(j > i - width, score, float("-inf"))


def _window(score, b, h, i, j, width):
    return score.masked_fill(j <= i - width, -math.inf)
