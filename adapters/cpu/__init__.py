"""What lets verl, with its real trainer and real vLLM rollouts, run on a machine without an accelerator."""
