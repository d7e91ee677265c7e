"""Accelerate and transformers on the engine; `zero_plugin.integrations.accelerate` holds the public names."""
