"""What a step of RL costs on Hopper GPUs, from arithmetic: ``python -m benchmarks.cost`` writes ``docs/scaling.md``."""
