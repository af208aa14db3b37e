"""Prompts of requests as tokens."""

from typing import TYPE_CHECKING, Any, cast

from msattn.trainer.errors import first_line
from msattn.trainer.serving.http.errors import ApiError, bad_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from msattn.trainer.serving.http.bodies import PromptParameter


class PromptEncoder:
    """Encodes the prompts of one model.

    Chat templates run in this process. Other commands fork it for each message, but a server has threads, and may have hundreds
    of gigabytes mapped; ``msattn serve`` renders a first message that way before it starts.

    Parameters
    ----------
    longest : tokens of a request, prompt and answer together.
    vocabulary : number of tokens that the model knows.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, longest: int, vocabulary: int) -> None:
        self._tokenizer, self.longest, self._vocabulary = cast("Any", tokenizer), longest, vocabulary

    def encode(self, prompt: "PromptParameter", max_tokens: int | None, default: int) -> tuple[list[int], int]:
        """Returns the tokens of a prompt, and the number of new tokens.

        Parameters
        ----------
        max_tokens : the number that the request asks for; None stands for ``default``, or what the prompt leaves.

        Raises
        ------
        ApiError : the prompt has no token, an unknown one or too many, or the chat template refuses the messages.
        """
        tokens = self._tokens(prompt)
        if not tokens:
            raise bad_value(prompt.param, f"{prompt.param}: no token is left of it; give some text")
        left = self.longest - len(tokens)
        if left < (max_tokens or 1):
            asked = "" if max_tokens is None else f" and max_tokens={max_tokens}"
            raise bad_value(
                prompt.param,
                f"{prompt.param}: {len(tokens)} tokens{asked} exceed the {self.longest} tokens of a request; shorten the prompt"
                + ("" if max_tokens is None else " or lower max_tokens"),
                code="context_length_exceeded",
            )
        return tokens, min(default, left) if max_tokens is None else max_tokens

    def _tokens(self, prompt: "PromptParameter") -> list[int]:
        if prompt.tokens is not None:
            if unknown := next((token for token in prompt.tokens if token >= self._vocabulary), None):
                raise bad_value(prompt.param, f"{prompt.param}: token {unknown} is none of the {self._vocabulary} of the model")
            return prompt.tokens
        try:
            if prompt.messages is None:
                return list(self._tokenizer(prompt.text).input_ids)
            return list(self._tokenizer(self._render(prompt.messages), add_special_tokens=False).input_ids)
        except ApiError:
            raise
        except Exception as error:  # whatever a template or a tokenizer raises for a text of the client
            raise bad_value(prompt.param, f"{prompt.param}: the model's tokenizer refuses it ({first_line(error)})") from error

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            raise bad_value("messages", "messages: the model has no chat template; send a prompt to /v1/completions")
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
