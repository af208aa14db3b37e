"""Soft-capped scores in kernels: ``softcap * tanh(score / softcap)``, before masking.

Kernels keep scores unscaled. The limit of unscaled scores is ``softcap / scale``, so that the
scaled ones stay within ``softcap``, and everything after the cap is as without it. A limit of None
compiles a kernel without a cap.
"""

from msattn.kernels.common.primitives import LN_2, tl, triton
from msattn.kernels.types import ScoreMod


def unscaled_limit(softcap: float | None, scale: float) -> float | None:
    """Returns the limit of unscaled scores, or None."""
    return None if softcap is None else softcap / scale


def softcap_mod(limit: float) -> ScoreMod:
    """Returns the score modification of dense decoding."""
    return ScoreMod(_softcap_kernel, _softcap, numbers=(float(limit),), built_in="softcap")


@triton.jit
def _softcap_kernel(score, b, h, i, j, limit):
    return cap_scores(score, limit)


def _softcap(score, b, h, i, j, limit):
    return limit * (score / limit).tanh()


@triton.jit
def cap_scores(s, limit):
    """Returns ``limit * tanh(s / limit)``."""
    return limit * _tanh(s * (1 / limit))


@triton.jit
def cap_scores_with_slope(s, limit):
    """Returns :func:`cap_scores` and its derivative, ``1 - tanh(s / limit)^2``."""
    t = _tanh(s * (1 / limit))
    return limit * t, 1 - t * t


@triton.jit
def _tanh(x):
    """Returns tanh to a few units in the last place; neither overflows nor needs libdevice."""
    decay = tl.exp2(tl.abs(x) * (-2 / LN_2))
    far = (1 - decay) / (1 + decay)
    x2 = x * x
    # 1 - decay cancels for small x
    near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))
