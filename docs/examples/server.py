"""Sparse attention in a server: enabled once, used by several threads, disabled at the end."""

from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import msattn
from msattn.trainer.models import EMBEDDED

tokenizer, model = AutoTokenizer.from_pretrained(EMBEDDED), AutoModelForCausalLM.from_pretrained(EMBEDDED)
requests = [f"def function_{i}(values):\n    " * 20 * (i + 1) for i in range(4)]  # prompts of different lengths


def serve(text: str) -> str:
    """Answers one request."""
    prompt = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(output[0, prompt.input_ids.shape[1] :]))


sparse = msattn.enable(model, gate="embedded", qmodel="embedded")
with ThreadPoolExecutor(max_workers=4) as pool:
    for text, answer in zip(requests, pool.map(serve, requests), strict=True):
        print(f"{len(text):5d} characters -> {answer!r}")
print(sparse.stats())
msattn.disable(model)
