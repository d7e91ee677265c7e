"""Where each state of a model should lie: byte and time formulas, a cost model over measured hardware, and a search."""
