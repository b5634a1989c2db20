"""Engine options and their checks, and the defaults of each kind of device."""
