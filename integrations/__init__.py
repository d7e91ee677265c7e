"""Frameworks that run on the engine; installed as `zero_plugin.integrations`."""
