"""Import of the prefill gates that SeerAttention's authors have released (arXiv 2410.13276), without their code.

Their repositories have a ``config.json``, the base model's with keys ``seerattn_*``, and the weights of all layers, of shape
``[heads, pools * D, hidden]``. Their scores are those of :class:`~msattn.trainer.seer.gate.AttnGate`: maxima, minima and means
of blocks before RoPE, projections, RoPE at the first position of each block, scaled products. Three differences are folded into
the weights:

- Key projections of a key/value head serve all query heads of its group: here each gate head has its own copy.
- Gates with one pooling of queries and the model's head size have no query projection: here it is the identity.
- YaRN's attention factor multiplies their rotated queries and keys: here the projections.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from msattn.trainer import artifacts, models
from msattn.trainer.artifacts.folders import is_hub_id
from msattn.trainer.config import GateConfig
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError
from msattn.trainer.models import rope
from msattn.trainer.models.architecture import pretrained_config
from msattn.trainer.models.identity import config_fingerprint
from msattn.trainer.models.limited import limited
from msattn.trainer.seer.gate import AttnGate, Gate
from msattn.trainer.storage.documents import checked
from msattn.trainer.storage.model_files import ModelFiles, local_folder

WEIGHTS = ("attn_gate_weights.safetensors", "attn_gate_weights.pth")
FAMILIES = ("llama", "qwen2")  # for which there are prefill gates
GATE_TYPE = re.compile(r"Q((?:max|min|avg)+)_K((?:max|min|avg)+)")
POOLING = re.compile(r"max|min|avg")
OF_DECODING = ("seerattn_q_head_pooling_type", "seerattn_k_seq_pooling_type")  # keys of SeerAttention-R


@dataclass(frozen=True)
class Keys:
    """The keys of ``config.json`` that describe prefill gates."""

    base_model: str
    seerattn_gate_type: str
    seerattn_gate_block_size: Annotated[int, Interval(ge=1, le=2**20)]
    seerattn_gate_hidden_size: Annotated[int, Interval(ge=2, le=16384)]
    seerattn_gate_force_double: bool = False
    head_dim: int | None = None


def import_gate(source: str, folder: Path, *, overwrite: bool = False) -> Gate:
    """Writes the gates of a repository of SeerAttention's authors as an artifact in ``folder``, and returns them.

    Parameters
    ----------
    source : a folder, or the id of a Hub repository such as ``SeerAttention/SeerAttention-Llama-3.1-8B-AttnGates``.

    Raises
    ------
    UserError : there are no such files, they are damaged or hold other objects than weights, they are gates for decoding, or
        their gates compute something else than ours; or ``folder`` cannot be written.
    """
    artifacts.check_writable(folder, overwrite)
    local = local_folder(source)
    if local is None and not is_hub_id(source):
        raise UserError(f"import-gate {shown(source)}: no such folder; accepted is a folder or the id of a Hub repository")
    files = ModelFiles(f"import-gate {shown(source)}", source if local is None else local).at_one_commit()
    keys, cfg = _read_keys(files)
    config = pretrained_config(files)
    models.check_supported(config)
    if config.rope_parameters["rope_type"] == "dynamic":
        raise UserError(f"{files.name}: rope_type=dynamic: the angles of its gates depend on the length, those of ours do not")
    gate = Gate.build(config, cfg)
    _fill(gate, _tensors(files), files, rope.inverse_frequencies(config, dim=cfg.hidden)[1], keys)
    name = source if local is None else local.resolve().name
    base = keys.base_model if re.fullmatch(r"[\w.-]+/[\w.-]+", keys.base_model) else Path(keys.base_model).name
    artifacts.write(
        folder,
        kind="gate",
        tensors=gate.tensors(),
        config={"imported_from": name, "revision": files.revision, "gate": asdict(cfg)},
        model=config_fingerprint(config, id=base),
        details=gate.details(),
        data=f"that of {name}",
        seed=0,  # not recorded there
        metrics={},
        overwrite=overwrite,
    )
    return gate


def _read_keys(files: ModelFiles) -> tuple[Keys, GateConfig]:
    """Returns the keys of the gates in ``config.json``, checked, and what they are as a configuration of ours."""
    document, where = files.config(), f"{files.name}: config.json"
    if any(key in document for key in OF_DECODING) and "seerattn_gate_type" not in document:
        raise UserError(f"{files.name}: these gates are for decoding (SeerAttention-R); accepted are gates for prefill")
    if document.get("model_type") not in FAMILIES:
        raise UserError(f"{where}: model_type={document.get('model_type')!s:.60}: accepted are {', '.join(FAMILIES)}")
    keys = checked(document, Keys, where)
    pools = GATE_TYPE.fullmatch(keys.seerattn_gate_type)
    if pools is None:
        raise UserError(f"{where}: seerattn_gate_type={keys.seerattn_gate_type:.60}: accepted are poolings, as Qavg_Kmaxminavg")
    q_pool, k_pool = (POOLING.findall(text) for text in pools.groups())
    try:
        cfg = GateConfig(
            block_size=keys.seerattn_gate_block_size,
            q_pool=q_pool,
            k_pool=k_pool,
            hidden=keys.seerattn_gate_hidden_size,
        )
    except UserError as error:
        raise UserError(f"{where}: the gates differ from ours: {error}") from error
    return keys, cfg


def _tensors(files: ModelFiles) -> dict[str, Any]:
    """Returns the objects in the file of weights; no code in it runs."""
    from safetensors.torch import load_file

    name = next((name for name in WEIGHTS if files.find(name) is not None), None)
    path = None if name is None else files.find(name)
    if path is None:
        raise UserError(f"{files.name}: there are no gates; accepted is {' or '.join(WEIGHTS)}")
    where = f"{files.name}: {name} does not hold weights alone"
    if path.suffix == ".safetensors" or name == WEIGHTS[0]:
        limited(lambda: load_file(path) and None, where)
        return load_file(path)
    limited(lambda: torch.load(path, map_location="meta", weights_only=True) and None, where)
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise UserError(f"{where} (it is a {type(found).__name__})")
    return found


@torch.no_grad()
def _fill(gate: Gate, tensors: dict[str, Any], files: ModelFiles, scaling: float, keys: Keys) -> None:
    """Sets the weights of ``gate``; ``scaling`` is the factor of rotated queries and of rotated keys.

    Raises
    ------
    UserError : the tensors have other names or shapes than the configuration asks for, or values that are not finite.
    """
    cfg, shape = gate.cfg, gate.model_shape()
    size, hidden = shape["head_dim"], keys.seerattn_gate_hidden_size
    if hidden != size and (keys.head_dim is not None or files.config()["model_type"] == "llama"):
        raise UserError(
            f"{files.name}: seerattn_gate_hidden_size={hidden}: its RoPE is that of heads of size {size}, ours that of the gate"
        )
    double = len(cfg.q_pool) > 1 or hidden != size or keys.seerattn_gate_force_double
    key_heads = shape["num_kv_heads" if double else "num_heads"]
    expected = {"mask_linear_k": (key_heads, len(cfg.k_pool) * size, hidden)}
    if double:
        expected["mask_linear_q"] = (shape["num_heads"], len(cfg.q_pool) * size, hidden)
    names = {
        (layer, part): f"model.layers.{layer}.self_attn.attn_gate.{part}.weight"
        for layer in range(shape["num_layers"])
        for part in expected
    }
    if different := sorted({*names.values()} ^ {*map(str, tensors)}):
        has = "has no" if different[0] in names.values() else "has a tensor that its config.json does not ask for,"
        raise UserError(f"{files.name}: the file of weights {has} {different[0]:.100}")
    weights = {
        place: _weight(tensors[name], expected[place[1]], f"{files.name}: {name}") * scaling for place, name in names.items()
    }
    for number in gate.layer_numbers:
        layer = gate.layers[number]
        assert isinstance(layer, AttnGate)
        copies = shape["num_heads"] // key_heads
        layer.key_weight.copy_(weights[number, "mask_linear_k"].mT.repeat_interleave(copies, dim=0))
        layer.query_weight.copy_(weights[number, "mask_linear_q"].mT if double else torch.eye(size) * scaling)


def _weight(tensor: Any, shape: tuple[int, ...], where: str) -> Tensor:
    """Returns a projection in fp32, checked."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise UserError(f"{where} is no tensor of real numbers")
    if tuple(tensor.shape) != shape:
        raise UserError(f"{where} has the shape {list(tensor.shape)}, by config.json it is {list(shape)}")
    values = tensor.float()
    if not values.isfinite().all():
        raise UserError(f"{where} has values that are not finite")
    return values
