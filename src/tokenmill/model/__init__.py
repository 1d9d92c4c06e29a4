"""What a model is: `read(path)` turns a file's header into one frozen `Profile`."""
