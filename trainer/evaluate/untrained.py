"""Routers without training, which are compared with classifiers and k-means: ``eval.routers``."""

from dataclasses import replace
from typing import TYPE_CHECKING

from msattn.trainer import models
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.evaluate.methods import ROUTED_TASKS, BucketRoutingMethod, ComparedMethods
from msattn.trainer.methods.pages import PageRouter
from msattn.trainer.methods.untrained.lsh import CollidingKeys
from msattn.trainer.methods.untrained.quest import QuestPages
from msattn.trainer.methods.untrained.random import RandomBuckets
from msattn.trainer.methods.untrained.window import WindowPages
from msattn.trainer.serving.loading import AnyRouter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NAMES = {"window": "sink and window", "random": "random buckets", "lsh": "LSH", "quest": "Quest pages"}  # by ``eval.routers``


def add_routers(methods: ComparedMethods, cfg: EvalRunConfig, model: "PreTrainedModel") -> ComparedMethods:
    """Returns ``methods`` with the routers of ``cfg.eval.routers`` after the others.

    They have the number of buckets, the layers and the dense window of the first other routing. Without one, they have the
    number of buckets of ``model.presets`` and route all served layers.
    """
    if not ROUTED_TASKS & {*cfg.eval.tasks}:
        return methods
    like = methods.bucket_routings[0] if methods.bucket_routings else None
    buckets = like.router.num_buckets if like else cfg.model.presets.num_buckets
    layers = like.router.layers if like else models.served_layers(model.config)
    added = []
    for name in cfg.eval.routers:
        router = _router(name, buckets, layers, model.config, cfg.seed).to(model.device)
        method = replace(like, router=router, keys=None) if like else BucketRoutingMethod.configured("", router, cfg)
        added.append(replace(method, name=NAMES[name]))
    return replace(methods, bucket_routings=[*methods.bucket_routings, *added])


def without_routers(methods: ComparedMethods) -> ComparedMethods:
    """Returns ``methods`` without those of :func:`add_routers` and without routers of pages, with the same notes."""
    learned = [each for each in methods.bucket_routings if each.name not in NAMES.values()]
    return replace(methods, bucket_routings=[each for each in learned if not isinstance(each.router, PageRouter)])


def _router(name: str, buckets: int, layers: list[int], config: "PreTrainedConfig", seed: int) -> AnyRouter:
    kv_heads = models.num_kv_heads(config)
    if name == "lsh":
        return CollidingKeys(buckets, layers, kv_heads, models.head_dim(config), seed)
    if name == "random":
        return RandomBuckets(buckets, layers, kv_heads, seed)
    return {"quest": QuestPages, "window": WindowPages}[name](buckets, layers, kv_heads)
