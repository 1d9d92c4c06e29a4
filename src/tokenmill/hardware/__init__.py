"""What the hardware is: `probe()` reads this machine into one frozen `Machine`."""
