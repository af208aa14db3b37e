"""Code that several operations share: argument checks, Triton primitives, registration, splits, block and bucket lists."""
