"""``jetrl parity``: one model in the rollout engine and in the trainer's form, the same tokens, two sets of log-probs."""
