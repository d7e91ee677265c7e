"""Update rules, sharded optimizer states, and the step that runs them."""
