"""Bad input and faults: the user's program still runs, or gets one clear error; nothing is lost or executed."""
