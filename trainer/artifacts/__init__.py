"""Artifacts: trained gates, k-means partitions and query classifiers on disk.

An artifact is a folder of four files: ``model.safetensors``, ``config.yaml`` (the resolved run
configuration), ``manifest.json`` (its kind, base model, training data and versions) and
``README.md`` (a model card for the Hub). Pickle is never used.
"""
# ruff: noqa: F401 (names for import from here)

from msattn.trainer.artifacts.folders import SHIPPED, artifacts_of_run, default_artifact, find
from msattn.trainer.artifacts.hub import push
from msattn.trainer.artifacts.kinds import KINDS, ROUTER_KINDS
from msattn.trainer.artifacts.manifest import Artifact, check_model, identity
from msattn.trainer.artifacts.module import ArtifactModule
from msattn.trainer.artifacts.reading import check_tensors, read, read_kind
from msattn.trainer.artifacts.writing import (
    check_writable,
    metrics_line,
    print_summary,
    versions,
    without_layers,
    write,
)
