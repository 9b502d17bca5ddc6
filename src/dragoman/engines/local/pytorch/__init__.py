"""The runner over PyTorch: weights of a safetensors folder, on a GPU."""
