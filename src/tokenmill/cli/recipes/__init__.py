"""Commands of the recipes: expand, distill, summarize, and the export for trainers."""
