"""Tests of text sources, the held-out split, chunks, and error messages."""

import gzip
import json
import lzma
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig
from msattn.trainer.data.chunking import Chunks, chunks, encode
from msattn.trainer.data.sources import Document, documents, is_held_out
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import UserError
from tests.data.texts import COMPRESSORS, parquet, zstd
from tests.factory import embedded_tokenizer

TEXTS = [f"Document {number}: déjà vu, “quoted”,\nnext line.\n" for number in range(40)]


def text_config(path: Path | str, **options: Any) -> DataConfig:
    return DataConfig("text", path=str(path), **options)


def all_of(path: Path | str, **options: Any) -> list[Document]:
    """Every document under ``path``, none held out."""
    return list(documents(text_config(path, heldout_path=str(path), **options), heldout=False))


def sides(cfg: DataConfig) -> tuple[list[Document], list[Document]]:
    return list(documents(cfg, heldout=False)), list(documents(cfg, heldout=True))


def jsonl(column: str = "text") -> bytes:
    return (
        "\n".join(
            json.dumps({"id": n, column: text}, ensure_ascii=False) for n, text in enumerate(TEXTS)
        ).encode()
        + b"\n"
    )


@pytest.mark.slow
def test_modules_of_the_library_by_name() -> None:
    train, heldout = sides(DataConfig("stdlib", path="json*"))
    texts = {document.name: document.text for document in (*train, *heldout)}
    whole = texts["json.decoder"] + texts.get("json.decoder, end", "")
    assert whole == (Path(sysconfig.get_path("stdlib")) / "json/decoder.py").read_text()
    assert all(name.startswith("json") for name in texts)
    with pytest.raises(
        UserError, match=r"data\.path=nothing: no module of Python's standard library"
    ):
        sides(DataConfig("stdlib", path="nothing"))
    with pytest.raises(UserError, match=r"data\.path=books/: data=stdlib reads no files"):
        DataConfig("stdlib", path="books/")


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_a_text_file_is_one_document(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"book.txt{compression}"
    path.write_bytes(
        COMPRESSORS[compression](b"\xef\xbb\xbf" + TEXTS[0].replace("\n", "\r\n").encode())
    )
    assert all_of(path) == [Document(path.name, TEXTS[0])]


@pytest.mark.parametrize(
    ("compression", "column"), [("", "text"), (".gz", "content"), (".zst", "text")]
)
def test_each_row_of_jsonl_and_parquet_is_a_document(
    tmp_path: Path, compression: str, column: str
) -> None:
    for suffix, content in (
        (".jsonl", jsonl(column)),
        (".parquet", parquet(id=range(len(TEXTS)), **{column: TEXTS})),
    ):
        path = tmp_path / f"rows{suffix}{compression}"
        path.write_bytes(COMPRESSORS[compression](content))
        found = all_of(path, column=column)
        assert [document.text for document in found] == TEXTS
        assert [document.name for document in found] == [
            f"{path.name}:{number}" for number in range(len(TEXTS))
        ]


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_texts_in_any_encoding_of_parquet(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet(encoding, text=TEXTS))
    assert [document.text for document in all_of(path)] == TEXTS


def test_jsonl_rows_may_contain_unicode_line_separators_and_end_with_crlf(tmp_path: Path) -> None:
    texts = ["a\u2028b\u0085c", "d\x0be"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        "\r\n".join(
            json.dumps({"text": text}, ensure_ascii=False) for text in [*texts, ""]
        ).encode()
        + b"\r\n\r\n"
    )
    assert [document.text for document in all_of(path)] == texts  # the empty one is left out


def test_folders_and_globs_are_searched(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"bee",
        "deep/a.txt.gz": gzip.compress(b"ay"),
        "notes.rst": b"no text",
        "empty.txt": b"",
        "SEA.TXT": b"see",
        "DEE.JSONL.GZ": gzip.compress(b'{"text": "dee"}'),
        "._b.txt": b"\xff, of macOS",
        ".ipynb_checkpoints/b-checkpoint.txt": b"bee",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    visible = [
        ("DEE.JSONL.GZ:0", "dee"),
        ("SEA.TXT", "see"),
        ("b.txt", "bee"),
        ("deep/a.txt.gz", "ay"),
    ]
    assert [(found.name, found.text) for found in all_of(tmp_path)] == visible
    assert all_of(tmp_path / ".ipynb_checkpoints") == [Document("b-checkpoint.txt", "bee")]
    assert all_of(tmp_path / "**" / "*.gz") == [Document("a.txt.gz", "ay")]
    (tmp_path / "odd[1].txt").write_text("odd")
    assert all_of(tmp_path / "odd[1].txt") == [Document("odd[1].txt", "odd")]


@pytest.mark.parametrize(
    ("name", "hashes_to_held_out"), [("book.txt", False), ("book-1.txt", True)]
)
def test_the_last_tenth_of_a_single_document_is_held_out(
    tmp_path: Path, name: str, hashes_to_held_out: bool
) -> None:
    assert is_held_out(name) == hashes_to_held_out
    text = "".join(TEXTS)
    (tmp_path / name).write_text(text)
    (train,), (heldout,) = sides(text_config(tmp_path / name))
    assert train.text + heldout.text == text
    assert len(train.text) == len(text) * 9 // 10
    assert train.name != heldout.name


def test_if_all_documents_hash_to_one_side_the_end_of_each_is_held_out(tmp_path: Path) -> None:
    names = [
        name for name in (f"{letter}.txt" for letter in "abcdefghijkl") if not is_held_out(name)
    ][:3]
    for name, text in zip(names, TEXTS, strict=False):
        (tmp_path / name).write_text(text)
    train, heldout = sides(text_config(tmp_path))
    assert [a.text + b.text for a, b in zip(train, heldout, strict=True)] == TEXTS[:3]
    assert all(document.text for document in heldout)


def test_all_of_a_held_out_path_is_held_out(tmp_path: Path) -> None:
    for name in ("train.txt", "heldout.txt"):
        (tmp_path / name).write_text(name)
    cfg = text_config(tmp_path / "train.txt", heldout_path=str(tmp_path / "heldout.txt"))
    assert sides(cfg) == (
        [Document("train.txt", "train.txt")],
        [Document("heldout.txt", "heldout.txt")],
    )


def test_chunks_are_slices_of_the_tokens_shuffled_by_the_seed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    path = str(tmp_path / "rows.jsonl")
    cfg = text_config(path, heldout_path=path, seq_len=16)
    eos = tokenizer.eos_token_id
    tokens = [
        token
        for text in TEXTS
        for token in [*tokenizer.encode(text, add_special_tokens=False), eos]
    ]
    assert encode(documents(cfg, heldout=False), tokenizer).tolist() == tokens

    first = chunks(cfg, tokenizer, seed=3)
    assert len(first) == len(tokens) // 16
    assert first[0]["input_ids"].dtype == torch.int64
    rows = [first[index]["input_ids"].tolist() for index in range(len(first))]
    assert sorted(rows) == sorted(
        tokens[start : start + 16] for start in range(0, len(tokens) - 15, 16)
    )

    again, other = chunks(cfg, tokenizer, seed=3), chunks(cfg, tokenizer, seed=4)
    assert again.fingerprint == first.fingerprint != other.fingerprint
    assert all(
        torch.equal(again[index]["input_ids"], first[index]["input_ids"])
        for index in range(len(first))
    )
    few = chunks(cfg, tokenizer, seed=3, num_chunks=2)
    assert [few[index]["input_ids"].tolist() for index in range(len(few))] == rows[:2]
    assert chunks(cfg, tokenizer, seed=3, seq_len=8)[0]["input_ids"].shape == (8,)


def test_each_document_begins_with_bos(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    own = embedded_tokenizer()
    own.bos_token = own.convert_ids_to_tokens(7)
    found = encode(
        documents(text_config(tmp_path / "rows.jsonl", heldout_path="none"), heldout=False),
        own,
        bos=True,
    ).tolist()
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert found == [token for ids in plain for token in (own.bos_token_id, *ids, own.eos_token_id)]
    own.bos_token = None
    with pytest.raises(UserError, match=r"data\.bos=true: the tokenizer has no BOS token"):
        chunks(text_config(tmp_path / "rows.jsonl", bos=True), own, seed=0)


def test_if_there_are_too_few_chunks_all_are_used_with_a_message(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0] * 20)
    cfg = text_config(tmp_path / "a.txt", seq_len=16)
    whole = chunks(cfg, tokenizer, seed=0)
    assert len(chunks(cfg, tokenizer, seed=0, num_chunks=len(whole))) == len(whole)
    assert capsys.readouterr().err == ""
    assert len(chunks(cfg, tokenizer, seed=0, num_chunks=999)) == len(whole)
    message = f"hold {len(whole)} chunks of 16 tokens, fewer than the 999 asked for\n"
    assert (
        capsys.readouterr().err
        == f"msattn: the documents of data.path={tmp_path / 'a.txt'} {message}"
    )


@pytest.mark.parametrize(("count", "left_out"), [(9, 0), (10, 1), (39, 3), (200, 8)])
def test_calibration_leaves_at_most_a_tenth_to_itself(
    count: int, left_out: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    every = Chunks(np.arange(2 * count).reshape(count, 2), tokenizer)
    train, last = every.split_off(8)
    if not left_out:
        assert train is last is every, "of so few chunks, both have all"
        return
    assert (len(train), len(last)) == (count - left_out, left_out)
    assert [part[i]["input_ids"].tolist() for part in (train, last) for i in range(len(part))] == [
        every[i]["input_ids"].tolist() for i in range(count)
    ]
    assert len({train.fingerprint, last.fingerprint, every.fingerprint}) == 3


def test_num_bytes_counts_the_text_after_the_first_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "The naïve café — 3 déjà vus.\n" * 9
    (tmp_path / "a.txt").write_text(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    cfg = text_config(
        tmp_path / "a.txt", heldout_path=str(tmp_path / "a.txt"), seq_len=len(ids) + 1
    )
    (chunk,) = [chunks(cfg, tokenizer, seed=0)]
    # the end-of-text token has no bytes
    assert chunk.num_bytes(0) == len(text.encode()) - len("The")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"data\.path=.*missing\.txt: no such file"),
        (
            "table.csv",
            b"a,b",
            r"data\.path=.*table\.csv: expected \.txt, \.md, \.jsonl, \.parquet, also compressed "
            r"as",
        ),
        ("latin1.txt", b"caf\xe9", r"data\.path=.*latin1\.txt: not UTF-8 at byte 3"),
        (
            "cut.txt.xz",
            lzma.compress(bytes(range(256)))[:-90],
            r"data\.path=.*cut\.txt\.xz: damaged xz data",
        ),
        (
            "cut.txt.zst",
            zstd(bytes(range(256)))[:-90],
            r"data\.path=.*cut\.txt\.zst: .*[Tt]runcated",
        ),
        ("cut.parquet", b"PAR1" + bytes(40), r"data\.path=.*cut\.parquet: .*[Pp]arquet"),
        (
            "rows.parquet",
            parquet(id=[1], body=["a"]),
            r"data\.column=text: .*rows\.parquet has no such column .*: id, body\)",
        ),
        (
            "gap.parquet",
            parquet(text=["a", None]),
            r"data\.column=text: .*row 1 has None in this column, expected text",
        ),
        (
            "broken.jsonl",
            b'{"text": "a"}\n{"text"',
            r"data\.path=.*broken\.jsonl, line 2: not JSON",
        ),
        (
            "other.jsonl",
            b'{"body": "a"}',
            r"data\.column=text: .*line 1 has no such column \(it has: body\)",
        ),
        (
            "list.jsonl",
            b"[1]",
            r"data\.column=text: .*line 1 has no such column \(it has: a list, not an object\)",
        ),
        (
            "number.jsonl",
            b'{"text": 7}',
            r"data\.column=text: .*line 1 has 7 in this column, expected text",
        ),
    ],
)
def test_refused_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(documents(text_config(tmp_path / name), heldout=False))


@pytest.mark.parametrize("encoding", [None, "PLAIN"])
def test_no_flipped_bit_of_parquet_with_checksums_changes_its_texts(
    tmp_path: Path, encoding: str | None
) -> None:
    path = tmp_path / "rows.parquet"
    content = parquet(encoding, checksums=True, text=TEXTS[:3])
    pages = len(content) - 8 - int.from_bytes(content[-8:-4], "little")  # then the footer
    for place in range(4, pages):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with suppress(UserError):
            assert [document.text for document in all_of(path)] == TEXTS[:3], place


@pytest.mark.parametrize("pattern", ["", "*.txt", "**/*"])
def test_a_link_to_no_file_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    cfg = text_config(tmp_path / pattern)
    with pytest.raises(
        UserError, match=r"^data\.path=\S+b\.txt: a link to a file that does not exist$"
    ):
        list(documents(cfg, heldout=False))


def test_errors_in_held_out_data_name_the_held_out_path(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"data\.heldout_path=.*b\.txt: not UTF-8 at byte 0"):
        list(
            documents(
                text_config(tmp_path / "a.txt", heldout_path=str(tmp_path / "b.txt")), heldout=True
            )
        )
    cfg = text_config(tmp_path / "b.txt", heldout_path=str(tmp_path / "a.txt"), seq_len=8)
    with pytest.raises(
        UserError,
        match=r"data\.seq_len=8: the documents of data\.heldout_path=.*a\.txt hold only 2 tokens$",
    ):
        chunks(cfg, tokenizer, seed=0, heldout=True)


def test_the_error_for_too_little_text_gives_the_token_count(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "short.txt").write_text("1234567890")
    with pytest.raises(
        UserError,
        match=r"data\.seq_len=64: the documents of data\.path=.*short\.txt hold only 10 tokens$",
    ):
        # 9 digits, end of text
        chunks(text_config(tmp_path / "short.txt", seq_len=64), tokenizer, seed=0)
    with pytest.raises(
        UserError,
        match=r"held-out documents of .* hold only 2 tokens; data\.heldout_path names others",
    ):
        chunks(text_config(tmp_path / "short.txt", seq_len=64), tokenizer, seed=0, heldout=True)


def test_a_tokenizer_that_fails_on_a_text_is_refused_in_one_line() -> None:
    """Its regular expression takes too many steps on the text; the library then raises what is no
    Exception.
    """
    failing = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_MODEL)
    splits: Any = pre_tokenizers
    slow = splits.Split(Regex("(?:(?: [a-z]{1,9}){1,9})+\u0001"), "isolated")
    failing.backend_tokenizer.pre_tokenizer = splits.Sequence(
        [slow, failing.backend_tokenizer.pre_tokenizer]
    )
    with pytest.raises(UserError, match="the model's tokenizer cannot encode the text ") as refused:
        encode(iter([Document("long", " zip nor quo my" * 300)]), failing)
    assert "\n" not in str(refused.value)
