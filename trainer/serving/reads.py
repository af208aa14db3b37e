"""Numbers of buckets and keys that new tokens read: as given, as the router's artifact records, or by default."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.thresholds import key_threshold, most_probes
from msattn.trainer.models.families import num_layers
from msattn.trainer.serving.loading import AnyRouter, check_router
from msattn.trainer.serving.options import AttachOptions

MAX_TOKENS = 10**9
# How routers are served whose manifest records nothing.
SERVING: dict[str, Any] = {"probes": 32, "recent": 2047, "sink": 1, "dense_layers": (0,)}


def checked_numbers(config: Any, router: AnyRouter | None, **given: Any) -> dict[str, Any]:
    """Returns the numbers of decoding with a router, {} without one.

    Raises UserError if a number is out of range or has no use, or the router is for another model.
    """
    if router is None:
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name}={value!r}: only decoding with a router uses it; give qmodel=")
        return {}
    check_router(router, config)
    if router.artifact is None and given["probes"] is None:
        given["probes"] = min(SERVING["probes"], router.num_buckets)
    numbers, buckets, layers = serving_numbers(router, given), router.num_buckets, num_layers(config)
    for name, least, most in (("probes", 0, buckets), ("recent", 1, MAX_TOKENS), ("sink", 0, MAX_TOKENS)):
        what = "the number of buckets" if name == "probes" else "tokens"
        require(least <= numbers[name] <= most, name, numbers[name], f"accepted are {least} to {most:,}, {what}")
    ok = all(0 <= layer < layers for layer in numbers["dense_layers"])
    require(ok, "dense_layers", numbers["dense_layers"], f"accepted are 0 to {layers - 1}")
    return numbers


def serving_numbers(
    router: AnyRouter | None, given: Mapping[str, Any], defaults: Mapping[str, Any] = SERVING
) -> dict[str, Any]:
    """Returns ``probes``, ``recent``, ``sink`` and ``dense_layers`` as ``given``, or as the router records, or the defaults."""
    recorded = router.artifact.manifest["details"].get("serving", {}) if router and router.artifact else {}
    found = {
        name: recorded.get(name, default) if given.get(name) is None else given[name] for name, default in defaults.items()
    }
    AttachOptions(**found)
    layers = tuple(map(int, found.pop("dense_layers")))
    return {name: int(value) for name, value in found.items()} | {"dense_layers": layers}


class Reads(NamedTuple):
    """The number of buckets that a new token visits at most (None: not given), and what limits them to fewer.

    ``share`` is the share of the keys that is asked for. Buckets are read from the ``density`` on, or blocks from the
    ``probability`` on.
    """

    probes: int | None
    share: float | None = None
    density: float | None = None
    probability: float | None = None


def reads_of(router: AnyRouter | None, *, probes: int | None, keys: float | None, threshold: float | None) -> Reads:
    """Returns what a new token reads by ``probes``, ``keys`` or ``threshold``.

    Raises UserError if two of the three are given, the router cannot serve them, or has no thresholds for this share.
    """
    given = [f"{name}={value}" for name, value in (("keys", keys), ("threshold", threshold)) if value is not None]
    if not given:
        return Reads(probes)
    (asked, *others) = given
    if probes is not None or others:
        raise UserError(f"{asked}: {others[0] if others else f'probes={probes}'} is given too; give one of the two")
    if router is None:
        raise UserError(f"{asked}: only decoding with a router uses it; give qmodel=")
    if threshold is not None:
        require(0 < threshold < 1, "threshold", threshold, "accepted is a number in (0, 1)")
        if not isinstance(router, DecodeGate):
            raise UserError(f"{asked}: needs a decode gate; other routers read probes")
        most = int(min(1 / float(threshold), router.num_buckets))  # probabilities sum to 1
        return Reads(most, probability=float(threshold))
    assert keys is not None
    if keys >= 1:
        return Reads(_whole_blocks(router, keys))
    if not isinstance(router, QModel | DecodeGate):
        raise UserError(
            f"{asked}: needs a query classifier or a decode gate, which predict attention; other routers take probes"
        )
    if router.thresholds is None:
        raise UserError(f"{asked}: this router has no calibrated thresholds; train it again, or give probes")
    density = key_threshold(router.thresholds, keys)
    return Reads(most_probes(keys, router.num_buckets), float(keys), density=density)


def _whole_blocks(router: AnyRouter, keys: float) -> int:
    """Returns the number of whole blocks of a decode gate in a number of keys."""
    if not isinstance(router, DecodeGate):
        raise UserError(f"keys={keys}: a number of keys needs a decode gate, whose blocks are equally large")
    size, most = router.block_size, router.block_size * router.num_buckets
    ok = size <= keys <= most and keys == int(keys)
    require(ok, "keys", keys, f"accepted are {size} (a block) to {most:,} keys, or a share of them")
    return int(keys) // size
