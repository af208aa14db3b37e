"""Import of the gates that SeerAttention's authors have released, for prefill and for decoding,
without their code.

Their repositories have the base model's ``config.json`` with additional keys ``seerattn_*``, and a
file with all gates. Import :func:`import_gate` from here.
"""

import re
from dataclasses import asdict
from pathlib import Path

from msattn.trainer import artifacts, models
from msattn.trainer.artifacts.folders import is_hub_id
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate, Finished
from msattn.trainer.methods.gate.official.decode import holds_decode_gates, read_decode_gates
from msattn.trainer.methods.gate.official.prefill import read_gates
from msattn.trainer.models.architecture import pretrained_config
from msattn.trainer.models.identity import config_fingerprint
from msattn.trainer.storage.model_files import ModelFiles, local_folder


def import_gate(
    source: str, folder: Path, *, overwrite: bool = False, finished_at: Finished | None = None
) -> Gate | DecodeGate:
    """Writes the gates of a repository of SeerAttention's authors as an artifact in ``folder``, and
    returns them.

    ``source`` is a folder, or the id of a Hub repository such as
    ``SeerAttention/SeerAttention-Llama-3.1-8B-AttnGates``. Blocks of decode gates that new tokens
    complete are rotated at the position of their key ``finished_at``; None: the last one, as the
    authors do. Raises UserError if files are missing, damaged, or contain other objects than
    weights, if the gates compute something that msattn's do not, if ``finished_at`` is given for
    prefill gates, or if ``folder`` cannot be written.
    """
    artifacts.check_writable(folder, overwrite)
    local = local_folder(source)
    if local is None and not is_hub_id(source):
        raise UserError(
            f"import-gate {shown(source)}: no such folder; expected a folder or the id of a Hub "
            f"repository"
        )
    files = ModelFiles(
        f"import-gate {shown(source)}", source if local is None else local
    ).at_one_commit()
    config = pretrained_config(files)
    models.check_supported(config)
    if holds_decode_gates(files.config()):
        gate, details, base = read_decode_gates(files, config, finished_at or "last")
    elif finished_at is None:
        gate, details, base = read_gates(files, config)
    else:
        raise UserError(
            f"--finished-at {finished_at}: these are gates for prefill; only decode gates take it"
        )
    name = source if local is None else local.resolve().name
    artifacts.write(
        folder,
        kind=gate.cfg.kind,
        tensors=gate.state_dict(),
        config={"imported_from": name, "revision": files.revision, "gate": asdict(gate.cfg)},
        model=config_fingerprint(
            config, id=base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) else Path(base).name
        ),
        details=details,
        data=f"that of {name}",
        seed=0,  # not recorded there
        metrics={},
        overwrite=overwrite,
    )
    return gate
