#!/usr/bin/env bash
# Llama-3.1-8B, rollouts of 8k tokens; see common.sh for what can be set.
NAME=llama3_1_8b_8k
MODEL=${MODEL:-$HOME/models/Llama-3.1-8B-Instruct}
RESPONSE=8192
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
