#!/usr/bin/env bash
# Qwen2.5-7B, rollouts of 8k tokens; see common.sh for what can be set.
NAME=qwen2_5_7b_8k
MODEL=${MODEL:-$HOME/models/Qwen2.5-7B}
RESPONSE=8192
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
