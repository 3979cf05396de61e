"""verl 0.9: FP8 training in its engines, exact mode with FSDP, quantize-once weight sync to vLLM, metrics in its logger."""
