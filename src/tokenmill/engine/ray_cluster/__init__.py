"""Engines on other machines: each plans for the machine that it is on, and answers a driver somewhere else.

faults     errors as values, because exceptions do not travel well
line       what a way to another machine must offer
host       what runs on each machine: its plan, its engine
engine     a host's engine as the driver sees it
nodes      which machines there are, and what they have
cluster    all of that over Ray; the one file that knows it
fleet      one engine on every machine that can have one, while machines come and go
"""
