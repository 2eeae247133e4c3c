"""How FSDP2 shards a model, small reductions over all ranks that nothing waits for, and the heartbeat of each rank."""
