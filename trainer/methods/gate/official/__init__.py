"""Import of the gates that SeerAttention's authors have released, for prefill and for decoding, without their code.

Their repositories have the base model's ``config.json`` with additional keys ``seerattn_*``, and a file with all gates.
"""

from msattn.trainer.methods.gate.official.convert import import_gate

__all__ = ["import_gate"]
