"""Sparse prefill without training: reads the blocks that Quest's bounds select, on any supported
model.

Usage: python docs/examples/untrained.py [MODEL_FOLDER_OR_HUB_ID] [TEXT_FILE]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import msattn

# the small model that ships with msattn
name = sys.argv[1] if len(sys.argv) > 1 else str(msattn.EMBEDDED)
text = Path(sys.argv[2] if len(sys.argv) > 2 else msattn.__file__).read_text(encoding="utf-8")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")
prompt = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(model.device)

with torch.no_grad():
    dense = model(**prompt).logits[0, -1].log_softmax(-1)
    for sparsity in (0.5, 0.8, 0.9):
        # dense_below=0: sparse at every length, although dense attention is faster for short
        # prompts.
        with msattn.attach(model, select="quest", sparsity=sparsity, dense_below=0) as sparse:
            found = model(**prompt).logits[0, -1].log_softmax(-1)
        distance = (dense.exp() * (dense - found)).sum().item()  # KL divergence of the next token
        print(
            f"{prompt.input_ids.shape[1]} tokens, {sparse.stats()['sparsity']:.0%} of the blocks "
            f"not read: KL {distance:.4f}"
        )
