"""`tokenmill expand`: grows a dataset from examples.

recipe           the rounds: write, compare, judge, keep
request          what is asked for, and the result
seeds            examples and where they come from
transforms       the ways in which an example is rewritten
prompts          prompt templates of these ways
lines            jobs as batch lines
answers          answers as examples, and verdicts
schema           JSON schemas that answers follow
near_duplicates  texts that are nearly the same
rows             the rows of the dataset
forecast         the stages before anything has run
"""
