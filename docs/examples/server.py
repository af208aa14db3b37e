"""Sparse attention in a server: enabled once, used by several threads, disabled at the end."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import msattn

tokenizer = AutoTokenizer.from_pretrained(msattn.EMBEDDED)
model = AutoModelForCausalLM.from_pretrained(msattn.EMBEDDED)
source = Path(json.decoder.__file__).read_text(encoding="utf-8")
requests = [source[:length] for length in (3000, 6000, 9000, 12000)]  # characters


def serve(text: str) -> str:
    """Answers one request."""
    prompt = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(output[0, prompt.input_ids.shape[1] :]))


# dense_below=0: sparse at these lengths, too, at which dense attention is faster.
sparse = msattn.enable(model, gate="embedded", qmodel="embedded", sparsity=0.8, dense_below=0)
with ThreadPoolExecutor(max_workers=4) as pool:
    for text, answer in zip(requests, pool.map(serve, requests), strict=True):
        print(f"{len(text):5d} characters -> {answer!r}")
stats = sparse.stats()  # of all threads
print(
    f"prompts read {1 - stats['sparsity']:.0%} of the blocks, new tokens "
    f"{stats['selectivity']:.0%} of the keys"
)
print(stats)
msattn.disable(model)
