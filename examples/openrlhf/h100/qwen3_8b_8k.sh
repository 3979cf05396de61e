#!/usr/bin/env bash
# Qwen3-8B-Base, rollouts of 8k tokens; see common.sh for what can be set.
NAME=qwen3_8b_8k
MODEL=${MODEL:-$HOME/models/Qwen3-8B-Base}
RESPONSE=8192
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
