"""Who holds which part of what: layout, blocks, ranks, and the hooks into autograd."""
