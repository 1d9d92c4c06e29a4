"""`tokenmill distill`: a teacher's answers to prompts, with tokens and log probabilities."""
