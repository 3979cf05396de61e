#!/usr/bin/env bash
# Llama-3.1-8B, rollouts of 16k tokens; see common.sh for what can be set.
NAME=llama3_1_8b_16k
MODEL=${MODEL:-$HOME/models/Llama-3.1-8B-Instruct}
RESPONSE=16384
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
