"""The tokenizer of teachers.

That of the embedded model is byte-level BPE with one token per digit, so that a model reads and writes numbers digit by digit.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from msattn.trainer.errors import UserError
from msattn.trainer.models.tokenizer import load_tokenizer as load_checked
from msattn.trainer.storage.model_files import ModelFiles


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Loads the tokenizer from the files in ``folder``."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def load_own_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of ``--tokenizer`` from files that are checked first.

    Raises
    ------
    UserError : as :func:`msattn.trainer.models.tokenizer.load_tokenizer`, or it has no BOS or EOS token, or runs in Python.
    """
    tokenizer = load_checked(ModelFiles(f"--tokenizer={folder}", folder))
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or None in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        raise UserError(f"--tokenizer={folder}: accepted is a fast tokenizer with a BOS and an EOS token")
    return tokenizer
