"""Learning rates as functions of tokens: schedules, how far a run is on one, cooldowns on request."""
