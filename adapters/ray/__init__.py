"""Ray: every worker of a job is patched before user code runs in it, on every node, and the driver checks that it is."""
