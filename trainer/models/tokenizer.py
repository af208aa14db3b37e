"""The tokenizer of a model, from files that are checked first."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from msattn.trainer.errors import UserError, only_errors
from msattn.trainer.models.config_keys import FileName
from msattn.trainer.models.gguf import gguf_header, gguf_tokenizer
from msattn.trainer.models.limited import limited
from msattn.trainer.storage.documents import checked
from msattn.trainer.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

VOCABULARY, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a folder of further templates
SLOW = ("tokenizer.model", "vocab.json")  # transformers builds a tokenizer from these
# it reads these too
OTHERS = (*SLOW, "added_tokens.json", "merges.txt", "vocab.txt", "tekken.json", "tiktoken.model")
# some regular expressions fail on long texts only
LONG_TEXT = " and so on it goes" * 200 + " 1234567890" * 50 + "a" * 500
# a text to encode and decode
PROBE = "".join(map(chr, range(32, 127))) + "\n\t The 2nd café, 東京." + LONG_TEXT


@dataclass(frozen=True)
class AddedToken:
    """A special token; None stands for the default of the library ``tokenizers``."""

    content: str
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None
    single_word: bool | None = None
    special: bool | None = None


@dataclass(frozen=True)
class NamedTemplate:
    """One of several chat templates."""

    name: str
    template: str


Token = str | AddedToken


@dataclass(frozen=True)
class Settings:
    """The keys of ``tokenizer_config.json``; the vocabulary and how text is split are in
    ``tokenizer.json``.
    """

    bos_token: Token | None = None
    eos_token: Token | None = None
    unk_token: Token | None = None
    pad_token: Token | None = None
    sep_token: Token | None = None
    cls_token: Token | None = None
    mask_token: Token | None = None
    additional_special_tokens: list[Token] | None = None
    extra_special_tokens: list[Token] | dict[str, Token] | None = None
    added_tokens_decoder: dict[int, AddedToken] | None = None
    chat_control_tokens: list[str] | None = None
    chat_template: str | list[NamedTemplate] | None = None
    clean_up_tokenization_spaces: bool | None = None
    split_special_tokens: bool = False
    model_max_length: Annotated[float, Interval(gt=0, le=1e31)] | None = None
    padding_side: Literal["left", "right"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    auto_map: dict[str, Any] | list[Any] | None = None
    # some versions of transformers read these instead of tokenizer.json
    fast_tokenizer_files: list[FileName] | None = None


def load_tokenizer(
    files: ModelFiles, config: "PreTrainedConfig | None", trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a model, loaded by transformers. Code that the user trusts runs
    once, without limits.

    The class of a tokenizer may depend on the model's ``config``; with None transformers reads
    ``config.json`` if there is one. Raises UserError if there is no tokenizer, if a file is
    damaged, if encoding a short text fails or takes long, if tokens are drawn at random, or if
    there is code that ``trust_remote_code`` does not allow.
    """
    from transformers import AutoTokenizer

    if (path := files.gguf) is not None:
        gguf_header(path, files.name)
        limited(lambda: _tried(gguf_tokenizer(path)), f"{files.name}: no tokenizer")
        return gguf_tokenizer(path)
    if files.folder is not None and not any(files.find(name) for name in (VOCABULARY, *SLOW)):
        raise UserError(
            f"{files.name}: the folder has no tokenizer (expected one of "
            f"{', '.join((VOCABULARY, *SLOW))})"
        )

    def load() -> Any:
        with only_errors("huggingface_hub"):
            return AutoTokenizer.from_pretrained(
                files.source,
                config=config,
                revision=files.revision,
                trust_remote_code=trust_remote_code,
            )

    try:
        if not trust_remote_code:
            _check_files(files)
            limited(lambda: _tried(load()), f"{files.name}: no tokenizer")
        return load()
    except (OSError, ValueError, KeyError) as error:
        raise files.error(error) from error


def _check_files(files: ModelFiles) -> None:
    """Raises UserError for settings of other types, for code, and for files that are too large or
    link out of the folder.
    """
    document = {**(files.json(SPECIAL) or {}), **(files.json(SETTINGS) or {})}
    settings = checked(document, Settings, f"{files.name}: {SETTINGS}")
    if isinstance(settings.auto_map, list) or "AutoTokenizer" in (settings.auto_map or ()):
        raise files.brings_code()
    extra = () if files.folder is None else sorted((files.folder / TEMPLATES).glob("*.jinja"))
    for name in (VOCABULARY, TEMPLATE, *(f"{TEMPLATES}/{path.name}" for path in extra)):
        files.text(name)
    for name in (*OTHERS, *(settings.fast_tokenizer_files or ())):
        files.check(name)


def _tried(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a short text after encoding and decoding. The chat template is tried, too: it may
    raise an error, for it is not known which messages it takes, but not run without end.
    """
    if tokenizer.chat_template is not None:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except MemoryError:
            raise
        except Exception:
            pass
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if getattr(backend.model, "dropout", None):
            raise ValueError("dropout: expected null")
        ids = backend.get_vocab(with_added_tokens=False).values()
        if len(set(ids)) < len(ids):
            raise ValueError("two tokens have the same id")
    return str(tokenizer.decode(tokenizer(PROBE).input_ids))
