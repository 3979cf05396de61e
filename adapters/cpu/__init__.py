"""Run real verl and OpenRLHF, with real vLLM rollouts, on a machine without an accelerator."""

#: ``needed_by`` of the fixes without which a framework does not run on a CPU
A_CPU_RUN = "a run on a CPU"
