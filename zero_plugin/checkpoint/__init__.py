"""Checkpoints: a folder of safetensors and one JSON index, which any number of ranks, stage and placement can load."""
