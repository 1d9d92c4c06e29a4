"""The search for an operating point. Pure: it asks for trials and is given their results.

search: `ask` and `tell`.  space: the settings and their ranges.  moves: the order in which they are tried.
curves, noise, forecasts: what trials and predictions say.  trial_log: every trial so far.
objectives, secondary_objectives, tradeoffs, verdict: what is best.
"""
