"""From logits to text: sampling, logprobs and detokenization."""
