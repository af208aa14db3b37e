"""Small models whose files name end tokens."""

import json
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer

from msattn.trainer.config import ModelConfig
from msattn.trainer.models import Loaded, load
from tests.factory import save_tokenizer, tiny_model

# a token, which is no special token, as in some fine-tuned checkpoints
END, END_TEXT = 128, "<|im_end|>"
ENDING_WITH = (
    "{%% for m in messages %%}{{ m.content }}{%% if m.role == 'assistant' %%} %s{%% "
    "endif %%}{%% endfor %%}"
)


def saved(
    folder: Path,
    *,
    config: Any = None,
    generation: Any = None,
    template: Any = None,
    eos: Any = None,
    added: str = END_TEXT,
) -> Loaded:
    """Saves a small model that names these end tokens, and returns it loaded; ``added`` is a token
    that is no ordinary text.
    """
    model = tiny_model(vocab_size=144)
    model.generation_config.eos_token_id = generation
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(added, special=False)])
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    tokenizer.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"eos_token_id": config}))
    return load(ModelConfig(name="small", path=str(folder)), device="cpu", dtype="float32")


def first_unique(tokens: list[int]) -> int:
    """Returns a token after the third that does not occur before its place."""
    return next(
        token for place, token in enumerate(tokens) if place > 2 and tokens.index(token) == place
    )
