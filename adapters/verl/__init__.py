"""verl: FP8 and exactness in its FSDP engines, quantize-once weight sync to its vLLM servers, metrics in its logger."""
