"""The comparison on shapes of prompts: ``python docs/experiments/prefill_shapes.py``."""

import json
from pathlib import Path

import prefill_shapes
import pytest
import torch
from prefill_shapes import KV_HEADS, Layer, Shape
from torch.nn.functional import scaled_dot_product_attention

from msattn.trainer.errors import UserError

SHAPE = Shape([70, 33], [577, 512], 3)


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_the_timed_attention_is_that_of_the_pass(
    monkeypatch: pytest.MonkeyPatch, sparsity: float
) -> None:
    monkeypatch.setattr(prefill_shapes, "HEADS", KV_HEADS)
    layer = Layer([SHAPE], sparsity=sparsity, page_size=64, device="cpu")

    def attention(q, k, v, given):
        out = torch.empty_like(q)
        for b, (first, end) in enumerate(given.query_start_loc.unfold(0, 2, 1).tolist()):
            own = [x[given.block_table_tensor[b].long()].flatten(0, 1) for x in (k, v)]
            keys, values = (x[: given.seq_lens[b]].transpose(0, 1) for x in own)
            rows = torch.arange(len(keys[0]) - end + first, len(keys[0]))[:, None]
            mask = torch.arange(len(keys[0])) <= rows
            queries = q[first:end].transpose(0, 1)
            out[first:end] = scaled_dot_product_attention(queries, keys, values, mask).transpose(
                0, 1
            )
        return out

    monkeypatch.setattr(prefill_shapes, "flash_attention", attention)
    calls = layer.calls(SHAPE)
    own = calls["msattn"]()  # writes the keys
    dense = calls["FlashAttention 3"]()
    left_out, _ = layer.sparse.statistics.sparsity()
    if sparsity:
        assert left_out is not None
        assert left_out > 0.2
        assert (own - dense).abs().max() > 0.1
    else:
        torch.testing.assert_close(own, dense, atol=2e-2, rtol=2e-2)


def test_passes_count_as_often_as_they_occurred(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    times = {"FlashAttention 3": 1.0, "msattn": 2.0, "read": 0.5}
    long = Shape([4], [40_000], 1)
    prefill_shapes.show([(SHAPE, times), (long, times | {"FlashAttention 3": 9.0})])
    out = capsys.readouterr().out
    assert "up to 32,768 keys" in out
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[-1][1:] == ["2", "4", "3.000", "2.000", "1.50", "50.0"]
    assert [line[-2] for line in lines[-3:-1]] == ["0.50", "4.50"]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"query_lens": [1]}', '{"query_lens": [0], "prefix_lens": [3], "count": 1}'],
)
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "shapes.jsonl"
    good = {"query_lens": [1, 2], "prefix_lens": [0, 5], "count": 2}
    file.write_text(json.dumps(good) + "\n")
    assert prefill_shapes.read_shapes([str(file)]) == [Shape([1, 2], [0, 5], 2)]
    file.write_text(json.dumps(good) + "\n" + line)
    with pytest.raises(UserError, match=r"shapes.jsonl, line 2"):
        prefill_shapes.read_shapes([str(file)])
