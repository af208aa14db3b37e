"""The tokenizer of a GGUF file: its vocabulary and merges, and how text is split, which files only name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SPECIAL, OF_USERS = 3, 4  # types of tokens that are matched in text before it is split
SPACE = "\u2581"  # stands for a space in sentencepiece's vocabularies
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class Split:
    """A way to split text before byte pairs are merged.

    Attributes
    ----------
    pattern : regular expression of the parts; None is that of GPT-2.
    digits : each digit is a part of its own, before the rest is split.
    whole : parts that are in the vocabulary are not merged from bytes.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False


REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SPLITS = {  # by tokenizer.ggml.pre
    "default": Split(),
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": Split(rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", whole=True),
    "qwen2": Split(rf"{WORDS}|\p{{N}}|{REST}"),
}


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer that the metadata of a GGUF file describe.

    Parameters
    ----------
    where : beginning of error messages.

    Raises
    ------
    UserError : another type of vocabulary, a way to split text that is not known, or damaged metadata.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    tokens, kind = own.get("tokens"), own.get("model")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or len(set(tokens)) < len(tokens):
        raise UserError(f"{where}: tokenizer.ggml.tokens: accepted is a list of tokens, each once")
    if kind == "gpt2":
        backend = _byte_level(tokens, own, where)
    elif kind == "llama":
        backend = _sentencepiece(tokens, own)
    else:
        raise UserError(f"{where}: tokenizer.ggml.model={kind!s:.40}: accepted are gpt2 and llama")
    types = own.get("token_type") or []
    for group in (SPECIAL, OF_USERS):
        chosen = [token for token, each in zip(tokens, types, strict=False) if each == group]
        known = [
            AddedToken(each, normalized=False, special=group == SPECIAL)
            for each in chosen
            if backend.token_to_id(each) is not None
        ]
        backend.add_special_tokens(known) if group == SPECIAL else backend.add_tokens(known)
    ids = {role: own.get(f"{name}_token_id") for role, name in ROLES.items()}
    named = {role: tokens[i] for role, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    bos = named.get("bos_token")
    if bos is not None and own.get("add_bos_token", kind == "llama" or own.get("pre") == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **named
    )


def _byte_level(tokens: Sequence[str], own: Mapping[str, Any], where: str) -> "Tokenizer":
    """Returns byte-level BPE with the merges of the file."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    name = own.get("pre", "default")
    if name not in SPLITS:
        raise UserError(f"{where}: tokenizer.ggml.pre={name!s:.40}: accepted are {', '.join(SPLITS)}")
    split, merges = SPLITS[name], [tuple(merge.split(" ", 1)) for merge in own.get("merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=split.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: Sequence[str], own: Mapping[str, Any]) -> "Tokenizer":
    """Returns BPE over characters, with bytes for those that are not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    # Gemma's files have real spaces in tokens that are nothing else.
    vocabulary = {SPACE * len(token) if token and not token.strip(" ") else token: i for i, token in enumerate(tokens)}
    unknown = own.get("unknown_token_id")
    unk = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    backend = Tokenizer(BPE(vocabulary, _merges(vocabulary), unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = own.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges that a vocabulary implies: earlier tokens are merged first, which is the order of their training."""
    found = []
    for token, rank in vocabulary.items():
        parts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(vocabulary[a], vocabulary[b], a, b) for a, b in parts if a in vocabulary and b in vocabulary]
        found += [(rank, *pair) for pair in sorted(pairs)]
    return [(a, b) for *_, a, b in sorted(found)]
