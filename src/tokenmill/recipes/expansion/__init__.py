"""`tokenmill expand`: grows a dataset from examples.

recipe           the rounds: write, compare, judge, keep
request          the request and the result
seeds            examples and the format of their file
transforms       ways to transform an example
prompts          prompt files of these ways
lines            jobs as batch lines
answers          answers as examples, and judge scores
schema           JSON schemas that answers must follow
near_duplicates  MinHash index of texts
rows             the rows of the dataset
forecast         the stages for a forecast
"""
