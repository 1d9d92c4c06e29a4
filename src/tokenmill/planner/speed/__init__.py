"""Forecast of tokens per second.

rates         constants fitted to measurements
memory_rates  the bandwidth of a tier
devices       capabilities of each device under given settings
work          bytes and operations of one step
step_time     seconds of a decode step and of a prefill micro-batch, term by term
forecast      decode and prefill speed of a plan
load_time     the duration of the load
offload       the batch size from which the GPU computes with host weights
calibration   corrections from this machine's recorded runs
"""
