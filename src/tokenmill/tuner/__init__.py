"""Measures engines: finds the operating point of a model on a machine, and applies measurements to plans.

point, point_store, point_scope   settings, trials and operating points; their storage; when they apply
search/                           pure: which settings to measure next, and which trial is best
calibrate, apply                  corrections of forecasts by measurements; both applied to a plan
trial_run, engine_rig, measure    the trial loop, the engines under test, one measurement
work, energy, noise_monitor       requests to measure with; joules; other load on the machine
describe                          a tuning as text
history                           speeds in the measurement journal
slots                             number of slots and KV layout of a running engine
bench/, soak/, qualify/           the other commands that measure
"""
