"""The tokenizer of the embedded model: byte-level BPE with one token per digit.

The model then reads and writes numbers digit by digit.
"""

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# A word includes its leading space, each digit is a piece, and so is each run of newlines or of spaces.
_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on ``texts``.

    Token 0 is ``<|endoftext|>``, which is both bos and eos; encoding does not add it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Loads the tokenizer from the files in ``folder``."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
