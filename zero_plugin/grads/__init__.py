"""Gradients between backward and step: reduced, kept in their tier, measured and clipped."""
