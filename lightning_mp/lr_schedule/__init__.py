"""Learning rates as functions of tokens: schedules, where a run stands on one, cooldowns on request."""
