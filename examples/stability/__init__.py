"""What a mismatch between trainer and rollout does in the long run: many short steps, several seeds, two cores.

verl and Ray take a minute to start and most of a step's time; here the same parts (real vLLM, the plugin's sync, the
plugin's trainer model, GRPO) run in one process, a second a step.
"""
