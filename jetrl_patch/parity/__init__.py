"""``jetrl parity``: run one model as rollout and as trainer, and compare the log-probs of the same tokens."""
