"""Where every byte of a model goes and what that will cost, before anything is loaded."""
