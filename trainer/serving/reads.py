"""Keys that new tokens read: as given, as the router's artifact records, or by default."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msattn.trainer.config.model import ModelPresets
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Router, decode_defaults
from msattn.trainer.methods.budgets import Budget, Probability, Probes
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.models.families import num_layers
from msattn.trainer.serving.loading import check_router
from msattn.trainer.serving.options import AttachOptions

NUMBERS = ("probes", "recent", "sink", "dense_layers")
PRESETS = ModelPresets()  # by which routers are served whose manifest records nothing


class Reads(NamedTuple):
    """The budget of a router, the first and last keys that are read besides, and the layers in which every key is."""

    budget: Budget
    recent: int
    sink: int
    dense_layers: tuple[int, ...]


def reads_of(router: Router | None, options: AttachOptions, config: Any) -> Reads | None:
    """Returns what new tokens read, None without a router.

    Raises UserError for a budget that the router cannot serve, a number that is out of range or has no use, or a router for
    another model.
    """
    given = {name: getattr(options, name) for name in ("threshold", "keys", *NUMBERS)}
    if router is None:
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name}={value!r}: only decoding with a router uses it; give qmodel=")
        return None
    check_router(router, config)
    numbers, layers = serving_numbers(router, given), num_layers(config)
    ok = max(numbers["dense_layers"], default=0) < layers
    require(ok, "dense_layers", numbers["dense_layers"], f"accepted are 0 to {layers - 1}")
    return Reads(_budget(router, options, numbers.pop("probes")), **numbers)


def serving_numbers(router: Router, given: Mapping[str, Any], presets: ModelPresets = PRESETS) -> dict[str, Any]:
    """Returns ``probes``, ``recent``, ``sink`` and ``dense_layers`` as ``given``, or as the router records, or the presets."""
    defaults = decode_defaults(presets, router.num_buckets)
    recorded = router.artifact.manifest["details"].get("serving", {}) if router.artifact else {}
    found = {
        name: recorded.get(name, default) if given.get(name) is None else given[name] for name, default in defaults.items()
    }
    return found | {"dense_layers": tuple(found["dense_layers"])}


def _budget(router: Router, options: AttachOptions, probes: int) -> Budget:
    """Returns the budget by ``threshold``, ``keys`` or, without them, ``probes``; UserError if the router cannot serve it."""
    keys, threshold, buckets = options.keys, options.threshold, router.num_buckets
    if threshold is not None:
        if not isinstance(router, DecodeGate):
            raise UserError(f"threshold={threshold}: needs a decode gate; other routers read probes")
        return Probability(threshold, int(min(1 / threshold, buckets)))  # probabilities sum to 1
    if keys is None:
        require(0 <= probes <= buckets, "probes", probes, f"accepted are 0 to {buckets:,}, the number of buckets")
        return Probes(probes)
    if keys >= 1:
        if not isinstance(router, DecodeGate):
            raise UserError(f"keys={keys:g}: a number of keys needs a decode gate, whose blocks are equally large")
        size, most = router.block_size, router.block_size * buckets
        require(
            size <= keys <= most, "keys", f"{keys:g}", f"accepted are {size} (a block) to {most:,} keys, or a share of them"
        )
        return Probes(int(keys) // size)
    if not isinstance(router, QModel | DecodeGate):
        raise UserError(f"keys={keys:g}: needs a query classifier or a decode gate, which predict attention; give probes")
    if router.thresholds is None:
        raise UserError(f"keys={keys:g}: this router has no calibrated thresholds; train it again, or give probes")
    return router.thresholds.budget(keys, buckets)
