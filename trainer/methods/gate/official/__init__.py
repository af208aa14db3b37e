"""Import of the gates that SeerAttention's authors have released, for prefill and for decoding, without their code.

Their repositories have a ``config.json``, the base model's with keys ``seerattn_*``, and a file with the gates of all layers.
"""

from msattn.trainer.methods.gate.official.convert import import_gate

__all__ = ["import_gate"]
