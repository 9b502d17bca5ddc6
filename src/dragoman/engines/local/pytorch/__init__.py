"""The runner over PyTorch, for GPUs: weights of a safetensors folder or a GGUF file."""
