"""What commands show: one file per command, for a terminal of 80 columns and as JSON. No view computes a result."""
