"""``jetrl parity``: log-probs of rollout and trainer, token by token."""
