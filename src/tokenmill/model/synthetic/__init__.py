"""Models without published weights: `ghost` has a true header and no data,
`generate` writes random weights that llama.cpp runs.
"""
