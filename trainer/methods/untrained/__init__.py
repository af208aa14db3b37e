"""Methods without training, a file each: block scores for prompts, and routers for new tokens."""
