"""Commands that serve models over HTTP and manage its keys."""
