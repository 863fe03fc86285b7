"""Many runs, one after the other, each in a process of its own: what ``millpond suite`` does."""
