"""Small agreements of all ranks that nobody waits for, and the heartbeat of each rank."""
