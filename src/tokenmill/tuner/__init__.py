"""Finds the operating point of a model on a machine by measuring, and applies what was measured to plans.

point, point_store, point_scope   settings, trials and operating points; where they are stored; when they hold
space, search, moves, curves      pure: which settings there are, and which to measure next
secondary_objectives, trial_log
objectives, noise, tradeoffs      pure: which trial is best, and what it costs
verdict
forecasts, calibrate, apply       forecasts of other settings; corrections by measurements; both applied to a plan
trial_run, engine_rig, measure    the loop of a tuning, the engines that it measures, one measurement
work, energy, noise_monitor       jobs to measure with; joules; what else used the machine
describe                          a tuning as text
history                           speeds in the measurement journal
slots                             number of slots and KV layout of a running engine
bench/, soak/, qualify/           the other commands that measure
"""
