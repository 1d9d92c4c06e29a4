"""One URL for chat and batches: OpenAI's protocol before the engines, interactive requests first."""
