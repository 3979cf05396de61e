"""The long-run effects of a mismatch between trainer and rollout: many short steps, several seeds, two cores.

verl and Ray take a minute to start and use most of a step's time. Here the same parts (real vLLM, the plugin's weight
sync and trainer model, GRPO) run in one process at about a second per step.
"""
