"""Monitoring of the gateway: metrics, health, and the dashboard with its data."""
