"""Helpers shared by the tests; imported as `support.<name>` through pytest's `pythonpath`."""
