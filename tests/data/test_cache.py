"""The token cache: the same tokens with and without it, one computation for all readers, and
recovery from damage.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig
from msattn.trainer.data import cache, chunking, chunks
from msattn.trainer.data.cache import cached
from msattn.trainer.storage import hashes
from tests.factory import embedded_tokenizer

TEXT = "".join(f"Line {number * number % 911} of a document: déjà vu.\n" for number in range(400))


@pytest.fixture(autouse=True)
def _keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LEAST_SECONDS", 0.0)


@pytest.fixture
def cfg(tmp_path: Path) -> DataConfig:
    (tmp_path / "text").mkdir()
    for name in "abcdefghijklmnop":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name}: {TEXT}")
    return DataConfig(
        "text", path=str(tmp_path / "text"), seq_len=32, cache=str(tmp_path / "tokens")
    )


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each encoding of a text."""
    calls: list[int] = []
    encode = chunking.encode

    def counted(*arguments: Any, **options: Any) -> np.ndarray:
        calls.append(1)
        return encode(*arguments, **options)

    monkeypatch.setattr(chunking, "encode", counted)
    return calls


def changed(cfg: DataConfig, **values: Any) -> DataConfig:
    return DataConfig(**{**vars(cfg), **values})


def entries(cfg: DataConfig) -> list[Path]:
    return sorted(path for path in Path(str(cfg.cache)).iterdir())


@pytest.mark.slow
def test_the_tokens_are_the_same_with_and_without_a_cache(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerFast, encodings: list[int]
) -> None:
    for heldout, options in (
        (False, {}),
        (True, {}),
        (False, {"needles": True}),
        (True, {"bos": True}),
    ):
        plain = chunks(changed(cfg, cache=None, **options), tokenizer, seed=1, heldout=heldout)
        first, again = (
            chunks(changed(cfg, **options), tokenizer, seed=1, heldout=heldout) for _ in range(2)
        )
        assert plain.fingerprint == first.fingerprint == again.fingerprint
    assert len(encodings) == 4 * 2, "once without the cache and once with it"
    assert len(entries(cfg)) == 4


def test_seed_and_length_of_chunks_share_an_entry(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    encodings: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    chunks(cfg, tokenizer, seed=0)
    chunks(cfg, tokenizer, seed=1, seq_len=16, num_chunks=3)
    chunks(changed(cfg, seq_len=64), tokenizer, seed=1)
    assert len(encodings) == len(entries(cfg)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        f"the tokens of the documents of data.path={cfg.path} are kept in {entries(cfg)[0]} ("
        in line
    )
    assert line.endswith(" MB; data.cache=null keeps none)")


def test_a_changed_text_tokenizer_or_setting_is_encoded_anew(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerFast, encodings: list[int]
) -> None:
    before = chunks(cfg, tokenizer, seed=0).fingerprint
    file = Path(str(cfg.path)) / "a.txt"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("déjà", "jàdé"))  # of the same size
    os.utime(file, ns=times)
    assert chunks(cfg, tokenizer, seed=0).fingerprint != before, (
        "also if the file claims its old time"
    )
    assert len(encodings) == 2
    (file.parent / "new.txt").write_text("new")
    chunks(cfg, tokenizer, seed=0)
    assert len(encodings) == 3
    other = embedded_tokenizer()
    other.add_tokens(["document"])
    with_token = chunks(cfg, other, seed=0).fingerprint
    assert with_token != chunks(cfg, tokenizer, seed=0).fingerprint
    assert with_token == chunks(changed(cfg, cache=None), other, seed=0).fingerprint


def test_a_text_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    versions = iter(range(10))
    made = cached(
        str(tmp_path), "tokens", lambda: next(versions), lambda: np.arange(3, dtype=np.int32)
    )
    assert made.tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "another entry"])
def test_a_damaged_entry_is_made_again(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = chunks(cfg, tokenizer, seed=0).fingerprint
    (path,) = entries(cfg)
    content = path.read_bytes()
    chunks(cfg, tokenizer, seed=0, heldout=True)
    (other,) = set(entries(cfg)) - {path}
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes(flipped if damage == "flipped" else other.read_bytes())
    capsys.readouterr()
    assert chunks(cfg, tokenizer, seed=0).fingerprint == expected
    assert f"warning: {path} is damaged (" in capsys.readouterr().err
    assert path.read_bytes() == content
    assert chunks(cfg, tokenizer, seed=0).fingerprint == expected
    assert capsys.readouterr().err == ""


def test_threads_make_an_entry_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(1)
        time.sleep(0.1)
        return np.arange(4)

    def read() -> None:
        cached(str(tmp_path / "tokens"), "tokens", lambda: "other key", make)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_an_unwritable_folder_and_a_full_disk_cost_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cached(str(tmp_path / "file"), "tokens", lambda: 1, lambda: np.arange(3)).tolist() == [
        0,
        1,
        2,
    ]
    assert (
        f"warning: data.cache={tmp_path / 'file'}: the folder is not writable, the tokens are not "
        f"kept" in capsys.readouterr().err
    )

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hashes, "save_file", full)
    assert cached(str(tmp_path / "tokens"), "tokens", lambda: 1, lambda: np.arange(3)).tolist() == [
        0,
        1,
        2,
    ]
    assert "cannot be written (No space left on device; " in capsys.readouterr().err
    assert list((tmp_path / "tokens").iterdir()) == []


def test_the_least_recently_used_entries_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_BYTES", 30_000)
    made: list[str] = []

    def read(key: str) -> None:
        # 8 kB
        cached(str(tmp_path), "tokens", lambda: key, lambda: made.append(key) or np.arange(1000))
        time.sleep(0.02)

    for key in ("a", "b", "c", "a", "d", "a", "c", "b"):
        read(key)
    assert made == ["a", "b", "c", "d", "b"], "b was the least recently used one when d came"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 30_000


def test_quick_work_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "LEAST_SECONDS", 60.0)
    assert cached(str(tmp_path), "tokens", lambda: 1, lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""
