"""HTTP front for chat and batches: OpenAI's protocol in front of the engines, interactive requests first."""
