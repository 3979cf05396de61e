"""Run real verl and OpenRLHF, with real vLLM rollouts, on a machine without an accelerator."""
