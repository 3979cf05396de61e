"""Speed benchmarks, always relative to a BF16 baseline measured in the same run."""
