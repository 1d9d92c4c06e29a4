"""Renders results for a terminal of 80 columns and as JSON, one file per command. Views compute nothing."""
