#!/usr/bin/env bash
# Qwen2.5-7B, rollouts of 16k tokens; see common.sh for what can be set.
NAME=qwen2_5_7b_16k
MODEL=${MODEL:-$HOME/models/Qwen2.5-7B}
RESPONSE=16384
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
