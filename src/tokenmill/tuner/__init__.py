"""Finding the operating point by measuring: dials are turned, engines are measured, and the best is remembered."""
