"""Recipes: datasets expanded, teachers distilled, documents summarised; on the batch room alone."""
