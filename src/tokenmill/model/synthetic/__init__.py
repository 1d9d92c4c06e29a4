"""Models without real weights: `ghost` writes a real header without weights, `generate` random weights."""
