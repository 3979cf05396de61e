"""Speed, always as a ratio against a BF16 baseline measured in the same run."""
