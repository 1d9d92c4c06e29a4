"""What the gateway shows of itself: metrics, health, and the dashboard's data."""
