"""Where each state of a model should lie: byte and time formulas, a cost model over measured hardware, and a search."""

from zero_plugin.planner.formulas import (
    communication_elements,
    largest_model,
    model_state_bytes,
    transformer_parameters,
    transformer_state_bytes,
)

__all__ = [
    "communication_elements",
    "largest_model",
    "model_state_bytes",
    "transformer_parameters",
    "transformer_state_bytes",
]
