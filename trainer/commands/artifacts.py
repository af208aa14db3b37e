"""``msattn push``, ``configure`` and ``import-gate``: upload artifacts, name them in a model's
files, import released gates.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msattn.trainer.config.select import ROUTERS
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, write_error
from msattn.trainer.progress import activity
from msattn.trainer.storage.documents import parse_yaml
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.model_files import ModelFiles, local_folder
from msattn.trainer.storage.replace import replace_file

if TYPE_CHECKING:
    from msattn.trainer.artifacts import Artifact
    from msattn.trainer.methods.gate.decode_gate import Finished


def push(folder: str, repository: str, *, private: bool = False) -> str:
    """Uploads the artifacts in ``folder`` (of an artifact or a run) in one commit; prints and
    returns its URL.
    """
    from msattn.trainer import artifacts

    url = artifacts.push(repository, _held(Path(folder).expanduser()), private=private)
    print(url, flush=True)
    return url


def _held(folder: Path) -> "dict[str, Artifact]":
    """Returns the artifacts of a folder, checked, by their folders in the repository."""
    from msattn.trainer import artifacts
    from msattn.trainer.artifacts.manifest import MANIFEST

    of_run = artifacts.artifacts_of_run(folder)
    if os.path.isfile(folder / MANIFEST) or not of_run:
        return {"": artifacts.read(folder)}
    return {kind: artifacts.read(path, kind) for kind, path in of_run.items()}


def configure(model: str, settings: Sequence[str]) -> None:
    """Checks options against a model, writes them into its ``config.json``, and prints them."""
    from msattn.trainer.artifacts.model_config import KEY, OWN, as_file, with_settings
    from msattn.trainer.models.loading import pretrained_config
    from msattn.trainer.serving.build import artifact_options, check_options

    name = f"configure {shown(model)}"
    folder = local_folder(model)
    if folder is None:
        raise UserError(
            f"{name}: no such folder; expected the folder of a model (msattn push configures one "
            f"on the Hub)"
        )
    files = ModelFiles(name, folder)
    given = dict(_setting(setting, folder, name) for setting in settings)
    with activity(name):
        own = {role: folder for role in ("gate", "qmodel") if given.get(role) == OWN}
        check_options(pretrained_config(files), artifact_options(given | own, name))
        path, content = folder / "config.json", as_file(with_settings(files.config(), given))
        try:
            with locked(path), replace_file(path) as new:
                new.write_bytes(content)
        except OSError as error:
            raise write_error(path, error, resumes=False) from error
    print(
        f"{path}  {KEY}: {', '.join(f'{key}={value}' for key, value in given.items())}", flush=True
    )


def _setting(text: str, model: Path, name: str) -> tuple[str, object]:
    """Returns key and value of ``key=value``; the path of an artifact is absolute, OWN if it is
    that of the model.
    """
    from msattn.trainer.artifacts.folders import is_hub_id
    from msattn.trainer.artifacts.model_config import OWN

    key, equals, value = text.partition("=")
    if not equals or not value:
        raise UserError(
            f"{name}: {shown(text)}: expected key=value, e.g. gate=outputs/llama3/base or "
            f"sparsity=0.8"
        )
    if key not in ("gate", "qmodel"):
        return key, parse_yaml(f"value: {value}", f"{name}: {key}")["value"]
    path = os.path.abspath(os.path.expanduser(value))
    # also a wrong one
    is_name = value in ROUTERS or (value.isidentifier() and not os.path.lexists(path))
    if value == "embedded" or (key == "qmodel" and is_name) or is_hub_id(value):
        return key, value
    return key, OWN if os.path.realpath(path) == os.path.realpath(model) else path


def import_gate(
    source: str, folder: Path, *, overwrite: bool = False, finished_at: "Finished | None" = None
) -> None:
    """Converts gates released by SeerAttention's authors to an artifact; prints a description and
    how to try it.
    """
    from msattn.trainer.methods.gate.official import import_gate as run

    with activity(f"importing {source}"):
        gate = run(source, folder, overwrite=overwrite, finished_at=finished_at)
    cfg, shape = gate.cfg, gate.model_shape()
    layers = f"{shape['num_layers']} layers"
    blocks = f"blocks of {cfg.block_size} tokens"
    pools = "+".join(cfg.k_pool)
    if cfg.phase == "decode":
        what = (
            f"decode gates of {layers} and {shape['num_kv_heads']} key/value heads, {blocks}, "
            f"pooling {pools}"
        )
        use = "keys=N (a budget of tokens), probes=N (blocks) or threshold=P (of a probability)"
    else:
        what = (
            f"gates of {layers} and {shape['num_heads']} heads, {blocks}, poolings "
            f"{'+'.join(cfg.q_pool)} and {pools}"
        )
        use = (
            "select=threshold (select.threshold, from 5e-4 to 5e-3) or select=topk "
            "(select.sparsity)"
        )
    print(f"{folder}  {what}\nThe gates have no calibrated thresholds: use {use}.", flush=True)
