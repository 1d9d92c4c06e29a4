"""Plans for the machine at hand, and the checks before anything is loaded."""
