"""Safetensors files: checked headers, mapped reading, streamed writing, names, packed tensors."""
