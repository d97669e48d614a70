"""Who computes each op: kernel records, selection at start, and the kernels themselves."""
