"""Tokens of texts, by tokenizers that may fail."""

from typing import Any

from msattn.trainer.errors import UserError, first_line


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns the tokens of each text, without special tokens.

    Raises
    ------
    UserError : the tokenizer fails, as one does whose regular expressions take too many steps on a text.
    """
    try:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        # The panics of libraries written in Rust are no Exceptions.
        raise UserError(f"the model's tokenizer cannot encode the text ({first_line(error)})") from error
