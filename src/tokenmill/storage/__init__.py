"""Files on disk that survive crashes: whole-file replacement (`atomic`)."""
