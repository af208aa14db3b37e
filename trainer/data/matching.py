"""The search for an expected answer in a generated text: whole words and numbers, in any script."""

import re
import unicodedata

# Numbers with their sign and decimals: a match must not begin or end inside one. A sign after a
# word is a hyphen. Several points (12.05.2024) separate numbers, and so do commas, of which a
# normalized text has none between thousands.
NUMBER = re.compile(r"(?:(?<![\w.])-?\.?)?(?:(?<!\d\.)\d+\.\d+(?!\.?\d)|\d+)")
THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
# how the names of characters begin whose scripts have no blanks between words, or join words and
# particles
NO_BLANKS = (
    *("BOPOMOFO", "CJK", "HANGUL", "HIRAGANA", "IDEOGRAPHIC", "KATAKANA"),
    *("KHMER", "LAO", "MYANMAR", "THAI", "TIBETAN"),
)
NOT_PLAIN = ("<super>", "<sub>", "<fraction>")  # NFKC would turn 10² into 102 and 3½ into 31/2
TYPOGRAPHIC = str.maketrans("‘’‚‛ʼ“”„‟‐‒–−", "'''''\"\"\"\"----")


def contains_answer(text: str, answer: str) -> bool:
    """Returns True if ``text`` contains ``answer`` as whole words and numbers.

    Equal are: upper and lower case, any white space, composed and decomposed letters, full-width
    and ordinary characters, typographic and plain quotes and hyphens, numbers with and without
    commas between thousands. Invisible characters do not count. An empty ``answer`` is in no text.
    """
    text, answer = normalized(text), normalized(answer)
    numbers = [match.span() for match in NUMBER.finditer(text)]
    spans = (
        (match.start(), match.start() + len(answer))
        for match in re.finditer(f"(?={re.escape(answer)})", text)
    )
    return bool(answer) and any(
        _ends_word(text[start - 1 : start], answer[0])
        and _ends_word(text[end : end + 1], answer[-1])
        and not any(first < start < last or first < end < last for first, last in numbers)
        for start, end in spans
    )


def normalized(text: str) -> str:
    """Returns a text in the form in which answers are compared."""
    plain = unicodedata.normalize("NFC", "".join(map(_plain, text))).translate(TYPOGRAPHIC)
    plain = THOUSANDS.sub(lambda match: match[0].replace(",", ""), plain)
    return " ".join(unicodedata.normalize("NFC", plain.casefold()).split())


def _plain(char: str) -> str:
    if char.isascii() or unicodedata.decomposition(char).startswith(NOT_PLAIN):
        return char
    return "" if unicodedata.category(char) == "Cf" else unicodedata.normalize("NFKC", char)


def _ends_word(beside: str, edge: str) -> bool:
    """Returns True if no word goes on from the character ``edge`` of an answer to the one
    ``beside`` it, if there is any.
    """
    of_words = beside != "" and (
        beside == "_" or beside.isalnum() or unicodedata.category(beside).startswith("M")
    )
    return not of_words or any(
        unicodedata.name(char, "").startswith(NO_BLANKS) for char in (beside, edge)
    )
