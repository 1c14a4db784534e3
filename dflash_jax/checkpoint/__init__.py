"""Checkpoints in and out: Hugging Face folders, GGUF files, Orbax directories."""
