"""The search for an operating point. Pure: it requests trials and receives their results.

search: `ask` and `tell`.  space: the settings and their values.  moves, secondary_objectives: the steps of a search.
trial_log: the trials so far.  noise, curves, forecasts: estimates from trials and from the planner.
objectives, tradeoffs, verdict: the best trial and its costs.
"""
