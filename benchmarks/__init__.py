"""Speed benchmarks, always relative to a BF16 baseline of the same run."""
