"""The engine that a run or a caller uses: chosen, opened, fitted to a batch, closed."""
